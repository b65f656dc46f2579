// The shell: pages by location.hash, choice of the run, state of the connection, keys and help.
import { Compare } from "./compare.js";
import { fill, h, problem, rowHead } from "./element.js";
import { duration, number } from "./format.js";
import { Group } from "./group.js";
import { Groups } from "./groups.js";
import { Overview } from "./overview.js";
import { Settings } from "./settings.js";
import { exported, get, Run, takeKey, useKey } from "./source.js";
import { Timeline } from "./timeline.js";

/** @type {Record<string, {title: string, key?: string, Page: PageClass}>} */
const PAGES = Object.assign(Object.create(null), { // names come from the address
	"": { title: "Overview", key: "o", Page: Overview },
	timeline: { title: "Timeline", key: "t", Page: Timeline },
	groups: { title: "Groups", key: "g", Page: Groups },
	"groups/": { title: "Group", Page: Group },
	compare: { title: "Compare", key: "c", Page: Compare },
	settings: { title: "Settings", key: "s", Page: Settings },
});
const DELAYS = [500, 15000]; // ms between two attempts to reach the server, at first and at most

const main = h("main", { id: "main", tabindex: "-1" });
const connection = h("span.chip", { role: "status" });
const navigation = h("nav", { "aria-label": "Pages" });
const choose = () => navigate(`#/${path()[0] ?? ""}`, { run: chooser.value });
const chooser = h("select", { "aria-label": "Run", onchange: choose });
const help = h("dialog.help", { "aria-label": "Keys", onclick: ({ target }) => target === help && help.close() });

const runs = /** @type {Run[]} */ ([]);
let page = /** @type {Page | null} */ (null);
let shown = "";
let chord = false;
/** @type {Set<Run>} The runs whose news the page loads. */
const followed = new Set();

/** The hash with the chosen run, which only the first run leaves out. @param {string} hash */
function link(hash, id = chosen().id) {
	const [address, text] = hash.split("?");
	const query = new URLSearchParams(text);
	if (id === runs[0]?.id) query.delete("run");
	else query.set("run", id);
	return `${address}${query.size ? `?${query}` : ""}`;
}

/** @param {string} hash */
function navigate(hash, { run = chosen().id } = {}) {
	const target = link(hash, run);
	if (target !== location.hash) location.hash = target;
}

function path() {
	return location.hash.replace(/^#\/?/, "").split("?")[0].split("/").filter(Boolean).map(decodeURIComponent);
}

function query() {
	return new URLSearchParams(location.hash.split("?")[1]);
}

function chosen() {
	return runs.find(({ id }) => id === query().get("run")) ?? runs[0];
}

function route() {
	const place = { path: path(), query: query() };
	const [name, ...rest] = place.path;
	const { title, Page } = PAGES[rest.length ? `${name}/` : name ?? ""] ?? PAGES[name] ?? PAGES[""];
	const run = chosen();
	for (const entry of navigation.children) {
		entry.href = link(entry.dataset.hash);
		entry.setAttribute("aria-current", entry.dataset.hash === `#/${name ?? ""}` ? "page" : "false");
	}
	const [before, now] = [shown, `${run.id} ${title}`];
	if (before === now && page?.route?.(place)) return;
	page?.close();
	main.replaceChildren();
	shown = now;
	chooser.value = run.id;
	document.title = `${title} · ${run.name} · Clotho`;
	main.setAttribute("aria-label", title);
	page = new Page(main, place, { run, runs, navigate, link });
	connected(run);
	for (const one of followed) if (one !== run && !page.followed?.has(one)) followed.delete(one);
	for (const one of [run, ...page.followed ?? []]) follow(one);
	if (before === now) return;
	scrollTo(0, 0);
	if (before) main.focus({ preventScroll: true });
}

/** Load what is new in a run while it is live and the page is visible. @param {Run} run */
async function follow(run) {
	if (followed.has(run)) return;
	followed.add(run);
	for (let delay = DELAYS[0]; run.live && followed.has(run);) {
		try {
			const changed = await run.advance(undefined, true);
			await visible();
			connected(run);
			delay = DELAYS[0];
			if (followed.has(run)) page?.update?.(run, changed);
		} catch (error) {
			if (error.status === 401) {
				askForKey();
				return;
			}
			connected(run, delay);
			await new Promise((resolve) => { setTimeout(resolve, delay * (0.8 + 0.4 * Math.random())); });
			delay = Math.min(2 * delay, DELAYS[1]);
		}
	}
	followed.delete(run);
}

// A page that nobody sees neither loads nor draws.
async function visible() {
	while (document.hidden) {
		await new Promise((resolve) => { document.addEventListener("visibilitychange", resolve, { once: true }); });
	}
}

/** @param {Run} run @param {number} [delay] of the next attempt to reach the server, in ms */
function connected(run, delay) {
	if (run !== chosen()) return;
	const { total_groups: total, included_groups: included } = run.entry;
	const state = exported ? "exported" : delay ? "lost" : run.live ? "live" : "finished";
	const texts = {
		live: "live",
		finished: "finished",
		lost: `no connection, next attempt in ${duration(Math.ceil(delay / 1000))}`,
		exported: total > included ? `file with ${number(included)} of ${number(total)} groups` : "file",
	};
	if (connection.textContent === texts[state]) return;
	connection.dataset.state = state;
	connection.textContent = texts[state];
	connection.title = delay ? "The run has ended or its server cannot be reached. After its end: clotho view RUN" : "";
}

function askForKey() {
	const field = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
	const submit = (event) => {
		event.preventDefault();
		useKey(field.value);
		shown = "";
		start();
	};
	page?.close();
	page = null;
	fill(main, h("form.card.key", { onsubmit: submit },
		h("h1", "This run needs an API key"),
		h("label", { for: "key" }, "Key of the run's server (server.api_key)"), field,
		h("button.button", "Open")));
	field.focus();
}

const KEYS = [
	["g o", "overview"], ["g t", "timeline"], ["g g", "groups"], ["g c", "compare"], ["g s", "settings"],
	["/", "search or filter"], ["Esc", "back"], ["?", "this help"],
];

function showHelp() {
	const rows = [...(page?.help ?? []), ...KEYS].map(([keys, text]) => h("tr", rowHead(h("kbd", keys)), h("td", text)));
	fill(help, h("h2", "Keys"), h("table", rows), h("button.button", { onclick: () => help.close() }, "Close"));
	help.showModal();
}

/** @param {any} event */
function pressed(event) {
	const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
	if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
	if (typing && event.key !== "Escape") return;
	const after = chord;
	chord = !after && event.key === "g";
	const opened = after && Object.entries(PAGES).find(([, entry]) => entry.key === event.key);
	if (opened) navigate(`#/${opened[0]}`);
	else if (page?.keys?.[event.key]) page.keys[event.key](event);
	else if (event.key === "?") showHelp();
	else if (event.key === "Escape" && typing) typing.blur();
	else if (event.key === "Escape" && path().length) navigate(`#/${path().slice(0, -1).join("/")}`);
	else return;
	event.preventDefault();
}

// The address may name the run before its hash: /?run=2#/ is #/?run=2.
function takeRun() {
	const url = new URL(location.href);
	const run = url.searchParams.get("run");
	if (exported || run === null) return;
	url.searchParams.delete("run");
	url.hash = link(location.hash || "#/", run);
	history.replaceState(null, "", url);
}

async function start() {
	try {
		const found = exported ?? await get("runs");
		runs.splice(0, runs.length, ...found.runs.map((entry) => new Run(entry)));
	} catch (error) {
		if (error.status === 401) askForKey();
		else {
			fill(main, problem(`The data cannot be loaded: ${error.message}`));
			setTimeout(start, 2000);
		}
		return;
	}
	takeRun();
	fill(chooser, runs.map((run) => h("option", { value: run.id }, run.name)));
	chooser.hidden = runs.length < 2;
	fill(navigation, Object.entries(PAGES).filter(([, entry]) => entry.key).map(([name, entry]) =>
		h("a", { href: "#/", "data-hash": `#/${name}` }, entry.title)));
	route();
}

takeKey();
document.body.append(
	h("header.top", h("a.brand", { href: "#/" }, "Clotho"), chooser, navigation, connection,
		h("button.button.small", { "aria-label": "Keys", title: "Keys (?)", onclick: showHelp }, "?")),
	main, help);
addEventListener("hashchange", () => runs.length && route());
addEventListener("keydown", pressed);
start();
