// The settings: changes from the defaults, facts of the machine and the model, preflight, and the resolved profile.
import { fill, filterField, h, problem } from "./element.js";
import { duration, missing, MISSING, number } from "./format.js";
import { finding } from "./overview.js";

// [key, value] of every leaf of nested objects, with keys joined by dots.
export function flat(value, prefix = "") {
	if (value === null || typeof value !== "object") return [[prefix, value]];
	if (Array.isArray(value) && !value.some((one) => one && typeof one === "object")) return [[prefix, value.join(", ")]];
	return Object.entries(value).flatMap(([key, inner]) => flat(inner, prefix ? `${prefix}.${key}` : key));
}

const text = (value) => (missing(value) || value === "" ? MISSING : String(value));

// A fact in words: a date, or a number with separators.
function fact(key, value) {
	if (key === "started" && typeof value === "number") return new Date(1000 * value).toLocaleString("en-GB", { dateStyle: "long", timeStyle: "short" });
	return typeof value === "number" ? number(value) : value;
}

export function show(container, parameters, { runId, source: { get } }) {
	const body = h("div");
	const filter = filterField("settings", draw);
	let overview = null;

	function table(title, entries, changed = new Map()) {
		const wanted = entries.filter(([key, value]) => `${key} ${value}`.toLowerCase().includes(filter.value.trim().toLowerCase()));
		return wanted.length ? h("section.card", h("h3", title), h("dl.pairs.mono",
			wanted.map(([key, value]) => h("div", { class: changed.has(key) && "changed" }, h("dt", key.startsWith(`${title}.`) ? key.slice(title.length + 1) : key), h("dd", text(value)))))) : null;
	}

	function draw() {
		if (!overview) return;
		const { profile, profile_changes: changes, facts, preflight } = overview;
		const changed = new Map(flat(changes ?? {}));
		const sections = new Map();
		for (const [key, value] of flat(profile ?? {})) {
			const name = key.includes(".") ? key.split(".")[0] : "run";
			sections.set(name, [...(sections.get(name) ?? []), [key, value]]);
		}
		fill(body, h("h2", "Preflight"), !preflight && h("p.muted", "The run has no preflight.json."),
			preflight && !preflight.findings.length && h("p", "No problem was found before the start."), preflight?.findings.map((found) => finding(found)),
			h("div.wide", table("Facts", flat(facts ?? {}).map(([key, value]) => [key.replaceAll("_", " "), fact(key, value)])), table("Changed from the defaults", [...changed])),
			h("h2", "Resolved profile"), h("div.columns", [...sections].map(([name, entries]) => table(name, entries, changed))));
	}

	fill(container, h("h1", "Settings"), h("div.toolbar", filter), body);
	get(`runs/${runId}/overview`).then((found) => {
		overview = found;
		draw();
	}, (error) => fill(body, problem(error.message)));
	return { update() {}, close() {}, keys: { "/": () => filter.focus() } };
}
