// Data of the runs: requests, the histories that the tab keeps, and the data inside an exported page.

const element = document.getElementById("export");
export const exported = /** @type {Exported | null} */ (element && JSON.parse(element.textContent));
const KEY = "clotho-key";

export class SourceError extends Error {
	/** @param {number} status @param {string} message */
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
	useKey(key);
	url.searchParams.delete("key");
	history.replaceState(null, "", url);
}

/** @param {string} key */
export function useKey(key) {
	sessionStorage.setItem(KEY, key);
}

/** get("runs/0/about") returns the JSON of the response. Raises SourceError with the message of the server.
 * @param {string} path @param {AbortSignal} [signal] */
export async function get(path, signal) {
	if (exported) return fromExport(exported.responses, `/dashboard/api/${path}`);
	const key = sessionStorage.getItem(KEY);
	const headers = key ? { Authorization: `Bearer ${key}` } : {};
	const response = await fetch(`dashboard/api/${path}`, { headers, signal, cache: "no-store" }).catch((error) => {
		throw new SourceError(0, `${error.message}. If the run has ended, show it with: clotho view RUN`);
	});
	if (response.ok) return response.json();
	const body = await response.json().catch(() => ({}));
	throw new SourceError(response.status, body.error?.message ?? `The server answered with status ${response.status}.`);
}

/** @param {Record<string, any>} responses @param {string} address */
function fromExport(responses, address) {
	const [path, text] = address.split("?");
	if (responses[path]?.error) throw new SourceError(404, responses[path].error.message);
	if (responses[path]) return responses[path];
	if (!path.endsWith("/groups/search")) {
		throw new SourceError(404, "This file does not contain these data. See the run itself with: clotho view RUN");
	}
	const wanted = new URLSearchParams(text).get("text").toLowerCase();
	const keys = Object.keys(responses).filter((key) => key.startsWith(path.replace("search", "")));
	const records = keys.map((key) => responses[key]);
	const contains = ({ group_id, prompt, answer, completions }) => group_id !== undefined
		&& [prompt, answer, ...completions.map(({ text: one }) => one)].some((one) => one?.toLowerCase().includes(wanted));
	return { group_ids: records.filter(contains).map(({ group_id }) => group_id) };
}

/** @type {("columns" | "minima" | "maxima")[]} */
const PARTS = ["columns", "minima", "maxima"]; // numbers, and of merged rows the least and the largest ones

// The rows of a history as columns. Names come from the files of a run, so that the columns inherit nothing. The column
// `lines` has the number of lines of the file that a row stands for; without it, every row is one line.
export class Columns {
	cursor = "";

	constructor() {
		this.clear();
	}

	clear() {
		this.empty();
		this.marks = /** @type {any[]} */ ([]);
		this.lost = this.damaged = 0;
	}

	empty() {
		this.columns = /** @type {Record<string, any[]>} */ (Object.create(null));
		this.minima = Object.create(null);
		this.maxima = Object.create(null);
		this.length = 0;
	}

	/** Add the rows of a response. Returns whether something has changed. @param {Rows} found */
	add(found) {
		if (found.whole) this.clear();
		this.cursor = found.cursor;
		this.damaged = found.damaged;
		this.lost = found.lost_marks ?? found.dropped;
		for (const mark of found.marks ?? []) this.marks.push(mark);
		return this.append(found) || found.whole;
	}

	/** @param {Part} found */
	append(found) {
		const [before, count] = [this.length, Object.values(found.columns)[0]?.length ?? 0];
		this.length += count;
		for (const part of PARTS) {
			for (const name of Object.keys(found[part] ?? {})) this[part][name] ??= Array(before).fill(null);
			for (const [name, values] of Object.entries(this[part])) {
				const added = found[part]?.[name];
				for (let row = 0; row < count; row += 1) values.push(added?.[row] ?? null);
			}
		}
		return count > 0;
	}

	/** Put the rows of a response in the place of those of their range. axis: an ascending column.
	 * @param {Part} found @param {string} axis */
	replace(found, axis) {
		const [inner, own] = [found.columns[axis] ?? [], this.get(axis)];
		const cut = (start, stop) => Object.fromEntries(PARTS.map((part) =>
			[part, Object.fromEntries(Object.entries(this[part]).map(([name, all]) => [name, all.slice(start, stop)]))]));
		const parts = [cut(0, own.filter((x) => x < inner[0]).length), found,
			cut(own.filter((x) => x <= inner.at(-1)).length, own.length)];
		this.empty();
		for (const part of parts) this.append(/** @type {Part} */ (part));
	}

	/** The largest number of lines of a row. @param {number} [start] @param {number} [stop] */
	thinning(start, stop) {
		return this.get("lines").slice(start, stop).reduce((most, lines) => Math.max(most, lines ?? 1), 1);
	}

	/** The values of a column; null in every row if there is no such column. @param {string} name @returns {any[]} */
	get(name) {
		return this.columns[name] ?? Array(this.length).fill(null);
	}
}

// A run, with its histories as far as the tab has loaded them: a later visit of a page loads what is new.
export class Run {
	state = /** @type {State} */ (null);
	about = /** @type {About} */ (null);
	loaded = /** @type {Set<Kind>} */ (new Set());
	/** @type {Record<Kind, Columns>} */
	tables = { metrics: new Columns(), evaluations: new Columns(), timeline: new Columns(), groups: new Columns() };

	/** @param {RunEntry} entry */
	constructor(entry) {
		this.id = entry.id;
		this.name = entry.name;
		this.live = entry.live;
		this.entry = entry;
	}

	/** @param {string} path @param {AbortSignal} [signal] */
	get(path, signal) {
		return get(`runs/${this.id}/${path}`, signal);
	}

	// Load what the run is.
	async describe() {
		this.about = await this.get("about");
	}

	/** Load some histories up to now. @param {Kind[]} kinds */
	async load(...kinds) {
		if (this.live || kinds.some((kind) => !this.loaded.has(kind))) await this.advance(kinds);
		for (const kind of kinds) this.loaded.add(kind);
	}

	/** Load what is new in some histories. wait: give the run time for news. Returns the histories that have changed.
	 * @param {Kind[]} [kinds] @param {boolean} [wait] */
	async advance(kinds = [...this.loaded], wait = false) {
		const sent = new Map(kinds.map((kind) => [kind, this.tables[kind].cursor]));
		const found = await this.get(`rows?${new URLSearchParams([...sent, ...(wait ? [["wait", "1"]] : [])])}`);
		this.state = found.state;
		this.live = found.state.live;
		// A response that was requested later can have been earlier: the rows of this one are then known.
		return kinds.filter((kind) => this.tables[kind].cursor === sent.get(kind) && this.tables[kind].add(found[kind]));
	}
}
