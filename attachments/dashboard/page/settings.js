// The settings: changes from the defaults, facts of the machine and the model, preflight, and the resolved profile.
import { fill, filterField, h, problem } from "./element.js";
import { missing, MISSING, number } from "./format.js";
import { finding } from "./overview.js";

/** [key, value] of every leaf of nested objects, with keys joined by dots.
 * @param {any} value @param {string} [prefix] @returns {[string, any][]} */
export function flat(value, prefix = "") {
	if (value === null || typeof value !== "object") return [[prefix, value]];
	if (Array.isArray(value) && !value.some((one) => one && typeof one === "object")) return [[prefix, value.join(", ")]];
	return Object.entries(value).flatMap(([key, inner]) => flat(inner, prefix ? `${prefix}.${key}` : key));
}

/** @param {any} value */
const text = (value) => (missing(value) || value === "" ? MISSING : String(value));

/** A fact in words: a date, or a number with separators. @param {string} key @param {any} value */
function fact(key, value) {
	if (key !== "started" || typeof value !== "number") return typeof value === "number" ? number(value) : value;
	return new Date(1000 * value).toLocaleString("en-GB", { dateStyle: "long", timeStyle: "short" });
}

export class Settings {
	body = h("div");
	filter = filterField("settings", () => this.draw());
	keys = { "/": () => this.filter.focus() };

	/** @param {HTMLElement} container @param {Place} _place @param {Context} context */
	constructor(container, _place, { run }) {
		this.run = run;
		fill(container, h("h1", "Settings"), h("div.toolbar", this.filter), this.body);
		run.describe().then(() => this.draw(), (error) => fill(this.body, problem(error.message)));
	}

	/** @param {string} title @param {[string, any][]} entries @param {Map<string, any>} [changed] */
	table(title, entries, changed = new Map()) {
		const wanted = this.filter.value.trim().toLowerCase();
		const found = entries.filter(([key, value]) => `${key} ${value}`.toLowerCase().includes(wanted));
		const name = (key) => (key.startsWith(`${title}.`) ? key.slice(title.length + 1) : key);
		return found.length ? h("section.card", h("h3", title), h("dl.pairs.mono", found.map(([key, value]) =>
			h("div", { class: changed.has(key) && "changed" }, h("dt", name(key)), h("dd", text(value)))))) : null;
	}

	draw() {
		if (!this.run.about) return;
		const { profile, profile_changes: changes, facts, preflight } = this.run.about;
		const changed = new Map(flat(changes));
		const sections = /** @type {Map<string, [string, any][]>} */ (new Map());
		for (const [key, value] of flat(profile ?? {})) {
			const name = key.includes(".") ? key.split(".")[0] : "run";
			sections.set(name, [...(sections.get(name) ?? []), [key, value]]);
		}
		/** @type {[string, any][]} */
		const words = flat(facts ?? {}).map(([key, value]) => [key.replaceAll("_", " "), fact(key, value)]);
		fill(this.body, h("h2", "Preflight"), !preflight && h("p.muted", "The run has no preflight.json."),
			preflight && !preflight.findings.length && h("p", "No problem was found before the start."),
			preflight?.findings.map((found) => finding(found)),
			h("div.wide", this.table("Facts", words), this.table("Changed from the defaults", [...changed])),
			h("h2", "Resolved profile"),
			h("div.columns", [...sections].map(([name, entries]) => this.table(name, entries, changed))));
	}

	close() {}
}
