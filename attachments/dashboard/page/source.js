// Data of the runs: requests, the stream of new lines, and the data inside an exported page.

const element = document.getElementById("export");
export const exported = element ? JSON.parse(element.textContent) : null;
export const runs = [];
const KEY = "clotho-key";
const SILENCE = 40000; // ms; the server sends a comment every 15 s

export class SourceError extends Error {
	constructor(status, message) {
		super(message);
		this.status = status;
	}
}

// The key of `?key=` leaves the address, so that a copied or bookmarked address does not contain it.
export function takeKey() {
	const url = new URL(location.href);
	const key = url.searchParams.get("key");
	if (exported || !key) return;
	sessionStorage.setItem(KEY, key);
	url.searchParams.delete("key");
	history.replaceState(null, "", url);
}

export function useKey(key) {
	sessionStorage.setItem(KEY, key);
}

export async function loadRuns() {
	runs.splice(0, runs.length, ...(exported ?? (await get("runs"))).runs);
	return runs;
}

// get("runs/0/metrics") returns the JSON of the response. Raises SourceError with the message of the server.
export async function get(path) {
	const address = `dashboard/api/${path.replace(/^\/?(dashboard\/api\/)?/, "")}`;
	if (exported) return fromExport(`/${address}`);
	const response = await request(address, {});
	return response.json();
}

async function request(address, headers, signal) {
	const key = sessionStorage.getItem(KEY);
	const all = key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
	const response = await fetch(address, { headers: all, signal, cache: "no-store" }).catch((error) => {
		throw new SourceError(0, `${error.message}. If the run has ended, show it with: clotho view RUN`);
	});
	if (response.ok) return response;
	const body = await response.json().catch(() => ({}));
	throw new SourceError(response.status, body.error?.message ?? `The server answered with status ${response.status}.`);
}

function fromExport(address) {
	const found = exported.responses[address];
	if (found?.error) throw new SourceError(404, found.error.message);
	if (found) return found;
	const search = address.match(/^(.*\/groups)\/search\?text=(.*)$/);
	if (!search) throw new SourceError(404, "This file does not contain these data. See the run itself with: clotho view RUN");
	const text = decodeURIComponent(search[2].replaceAll("+", " ")).toLowerCase();
	const group_ids = [];
	for (const [key, record] of Object.entries(exported.responses)) {
		if (!key.startsWith(`${search[1]}/`) || !record.completions || record.group_id === undefined) continue;
		const texts = [record.prompt, record.answer, ...record.completions.map((completion) => completion.text)];
		if (texts.some((value) => value?.toLowerCase().includes(text))) group_ids.push(record.group_id);
	}
	return { group_ids };
}

// Follow a live run. handlers: {metrics(data), evaluations(data), timeline(data), groups(data), overview(data), reset(),
// state(name, seconds)} with the states "live", "lost" (next attempt in `seconds`) and "finished".
export function subscribe(runId, handlers) {
	let cursor = null;
	let delay = 500;
	let controller = null;
	let timer = null;
	let closed = Boolean(exported);

	function dispatch(event, data, id) {
		if (id) cursor = id;
		handlers[event]?.(data);
		if (event !== "overview" || data.live) return;
		close();
		handlers.state?.("finished");
	}

	async function follow() {
		controller = new AbortController();
		const mine = controller;
		let watchdog = setTimeout(() => mine.abort(), SILENCE);
		try {
			const headers = { Accept: "text/event-stream", ...(cursor && { "Last-Event-ID": cursor }) };
			const response = await request(`dashboard/api/runs/${runId}/events`, headers, mine.signal);
			handlers.state?.("live");
			await events(response.body, dispatch, () => {
				delay = 500;
				clearTimeout(watchdog);
				watchdog = setTimeout(() => mine.abort(), SILENCE);
			});
		} catch (error) {
			if (error.status === 401) return handlers.state?.("unauthorized");
		} finally {
			clearTimeout(watchdog);
		}
		if (closed) return undefined;
		handlers.state?.("lost", Math.ceil(delay / 1000));
		timer = setTimeout(follow, delay * (0.8 + 0.4 * Math.random()));
		delay = Math.min(2 * delay, 15000);
		return undefined;
	}

	function close() {
		closed = true;
		clearTimeout(timer);
		controller?.abort();
	}

	if (!closed) follow();
	return { close };
}

// Parse a text/event-stream; `alive` is called for everything that arrives, comments included.
async function events(body, dispatch, alive) {
	const reader = body.pipeThrough(new TextDecoderStream()).getReader();
	let rest = "";
	for (;;) {
		const { value, done } = await reader.read();
		if (done) return;
		alive();
		const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
		rest = blocks.pop();
		for (const block of blocks) {
			const fields = { data: [] };
			for (const line of block.split("\n")) {
				const [, name, text] = line.match(/^([^:]*):? ?(.*)$/);
				if (name === "data") fields.data.push(text);
				else fields[name] = text;
			}
			if (fields.data.length) dispatch(fields.event ?? "message", JSON.parse(fields.data.join("\n")), fields.id);
		}
	}
}

const PARTS = ["columns", "minima", "maxima"]; // numbers, and of merged rows the least and the largest ones

// Rows as columns; new rows whose key is known are dropped. Rows that arrive before `load` are kept until then. Names
// come from the files of a run, so that the columns inherit nothing. The column `lines` has the number of lines of the
// file that a row stands for; without it, every row is one line.
export class Columns {
	constructor(...key) {
		this.key = key;
		this.early = [];
		this.loaded = false;
		this.clear();
	}

	clear() {
		for (const part of PARTS) this[part] = Object.create(null);
		this.length = 0;
		this.known = new Set();
	}

	// found: a response with columns.
	load(found) {
		this.clear();
		this.loaded = true;
		this.append(found);
		this.early.splice(0).forEach((early) => this.append(early));
	}

	add(found) {
		if (this.loaded) return this.append(found);
		this.early.push(found);
		return 0;
	}

	// Put the rows of a response in the place of those of their range.
	replace(found) {
		const [axis, own] = [found.columns[this.key[0]] ?? [], this.get(this.key[0])];
		const cut = (start, stop) => Object.fromEntries(PARTS.map((part) =>
			[part, Object.fromEntries(Object.entries(this[part]).map(([name, values]) => [name, values.slice(start, stop)]))]));
		const parts = [cut(0, own.filter((x) => x < axis[0]).length), found, cut(own.filter((x) => x <= axis.at(-1)).length)];
		this.clear();
		parts.forEach((part) => this.append(part));
	}

	// The largest number of lines of a row.
	thinning(start, stop) {
		return this.get("lines").slice(start, stop).reduce((most, lines) => Math.max(most, lines ?? 1), 1);
	}

	// Returns the number of new rows.
	append(found) {
		const before = this.length;
		const { columns } = found;
		const names = Object.keys(columns);
		const count = names.length ? columns[names[0]].length : 0;
		const targets = PARTS.flatMap((part) => {
			for (const name of Object.keys(found[part] ?? {})) this[part][name] ??= Array(before).fill(null);
			return Object.entries(this[part]).map(([name, values]) => [values, found[part]?.[name]]);
		});
		for (let row = 0; row < count; row += 1) {
			const key = this.key.map((name) => columns[name]?.[row]).join("/");
			if (this.known.has(key)) continue;
			this.known.add(key);
			this.length += 1;
			for (const [values, added] of targets) values.push(added?.[row] ?? null);
		}
		return this.length - before;
	}

	// The values of a column; null in every row if there is no such column.
	get(name) {
		return this.columns[name] ?? Array(this.length).fill(null);
	}
}
