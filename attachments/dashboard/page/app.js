// The shell: pages by location.hash, choice of the run, state of the connection, keys and help.
import { fill, h, problem, rowHead } from "./element.js";
import { duration, number } from "./format.js";
import { Columns, exported, get, loadRuns, runs, subscribe, takeKey, useKey } from "./source.js";
import { show as showCompare } from "./compare.js";
import { show as showGroup } from "./group.js";
import { show as showGroups } from "./groups.js";
import { show as showOverview } from "./overview.js";
import { show as showSettings } from "./settings.js";
import { show as showTimeline } from "./timeline.js";

const PAGES = {
	__proto__: null, // names come from the address
	"": { title: "Overview", key: "o", show: showOverview },
	timeline: { title: "Timeline", key: "t", show: showTimeline },
	groups: { title: "Groups", key: "g", show: showGroups },
	"groups/": { title: "Group", show: showGroup },
	compare: { title: "Compare", key: "c", show: showCompare },
	settings: { title: "Settings", key: "s", show: showSettings },
};

const main = h("main", { id: "main", tabindex: "-1" });
const connection = h("span.chip", { role: "status" });
const navigation = h("nav", { "aria-label": "Pages" });
const chooser = h("select", { "aria-label": "Run", onchange: () => navigate(`#/${path()[0] ?? ""}`, { run: chooser.value }) });
const help = h("dialog.help", { "aria-label": "Keys", onclick: (event) => event.target === help && help.close() });

let page = null;
let shown = "";
let stream = null;
let overview = null;
let chord = false;

const context = {
	get runId() { return runId(); },
	get run() { return runs.find((run) => run.id === runId()); },
	get overview() { return overview; },
	source: { get, exported, Columns }, runs, navigate, link,
};

// The hash with the chosen run, which only the first run leaves out.
function link(hash, { run = runId() } = {}) {
	const [address, text] = hash.split("?");
	const query = new URLSearchParams(text);
	if (run === runs[0]?.id) query.delete("run");
	else query.set("run", run);
	return `${address}${query.size ? `?${query}` : ""}`;
}

function navigate(hash, { replace = false, run } = {}) {
	const target = link(hash, { run: run ?? runId() });
	if (target === location.hash) return;
	if (!replace) location.hash = target;
	else {
		history.replaceState(null, "", target);
		route();
	}
}

function path() {
	return location.hash.replace(/^#\/?/, "").split("?")[0].split("/").filter(Boolean).map(decodeURIComponent);
}

function query() {
	return new URLSearchParams(location.hash.split("?")[1]);
}

function runId() {
	const wanted = query().get("run");
	return runs.some((run) => run.id === wanted) ? wanted : runs[0].id;
}

function route() {
	const parameters = { path: path(), query: query() };
	const [name, ...rest] = parameters.path;
	const found = PAGES[rest.length ? `${name}/` : name ?? ""] ?? PAGES[name] ?? PAGES[""];
	const run = runId();
	for (const entry of navigation.children) {
		entry.href = link(entry.dataset.hash);
		entry.setAttribute("aria-current", entry.dataset.hash === `#/${name ?? ""}` ? "page" : "false");
	}
	const same = shown === `${run} ${found.title}`;
	if (!shown.startsWith(`${run} `)) follow(run);
	if (same && page?.route?.(parameters)) return;
	page?.close();
	main.replaceChildren();
	shown = `${run} ${found.title}`;
	chooser.value = run;
	document.title = `${found.title} · ${context.run.name} · Clotho`;
	page = found.show(main, parameters, context);
	if (!same) scrollTo(0, 0);
}

// Load the overview of the run and follow the run while it is live.
function follow(run) {
	stream?.close();
	overview = null;
	const current = () => run === runId();
	const pass = (kind) => (data) => page?.update?.(kind, data);
	const updated = (data) => {
		overview = { ...overview, ...data };
		pass("overview")(data);
	};
	if (context.run.live) {
		const kinds = ["metrics", "evaluations", "timeline", "groups"].map((kind) => [kind, pass(kind)]);
		stream = subscribe(run, { ...Object.fromEntries(kinds), overview: updated, reset: again, state });
	} else state(exported ? "exported" : "finished");
	get(`runs/${run}/overview`).then((data) => current() && updated(data), (error) => current() && failed(error));
}

function again() {
	shown = "";
	route();
}

function state(name, seconds) {
	const run = context.run;
	const texts = {
		live: "live",
		finished: "finished",
		lost: `no connection, next attempt in ${duration(seconds)}`,
		unauthorized: "key needed",
		exported: run.total_groups > run.included_groups
			? `file with ${number(run.included_groups)} of ${number(run.total_groups)} groups` : "file",
	};
	connection.dataset.state = name;
	connection.textContent = texts[name];
	connection.title = name === "lost" ? "The run has ended or its server cannot be reached. After its end: clotho view RUN" : "";
	if (name === "unauthorized") askForKey();
}

function failed(error) {
	if (error.status === 401) askForKey();
	else fill(main, problem(`The data cannot be loaded: ${error.message}`));
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
	const rows = (pairs) => pairs.map(([keys, text]) => h("tr", rowHead(h("kbd", keys)), h("td", text)));
	fill(help, h("h2", "Keys"), h("table", rows([...(page?.help ?? []), ...KEYS])),
		h("button.button", { onclick: () => help.close() }, "Close"));
	help.showModal();
}

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
	url.hash = link(location.hash || "#/", { run });
	history.replaceState(null, "", url);
}

async function start() {
	try {
		await loadRuns();
	} catch (error) {
		failed(error);
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
addEventListener("hashchange", route);
addEventListener("keydown", pressed);
start();
