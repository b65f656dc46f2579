// One group: its prompt and outcome, its completions with the values of every token, and the diff of two completions.
import { compare, diffView, LEVELS } from "./diff.js";
import { fill, h, problem, update } from "./element.js";
import { active, GroupIndex } from "./filters.js";
import { MISSING, missing, number } from "./format.js";
import { hidden, inTurns, state, versions, visible } from "./text.js";
import { elements, legend, OVERLAYS, scaleOf, tokenTable } from "./tokens.js";

const TOKENS = 4000; // tokens on one page of a completion
const CHARACTERS = 40000; // characters on one page of a text without tokens
const SCALES = [["", "fixed"], ["rank", "rank in the group"]];
const ALL = 20000; // characters of a group whose completions are all open

export class Group {
	id = /** @type {number | null} */ (null);
	completion = /** @type {number | null} */ (null);
	token = /** @type {number | null} */ (null);
	query = new URLSearchParams();
	record = /** @type {GroupRecord | null} */ (null);
	values = /** @type {(TokenValues | null)[]} */ ([]);
	reason = "";
	/** @type {Map<number, number>} The page of each completion. */
	pages = new Map();
	unfolded = /** @type {Set<number>} */ (new Set());
	compared = /** @type {any} */ ({});
	links = h("div.toolbar.links");
	page = h("div");
	panel = h("aside.card.panel", { hidden: true, "aria-live": "polite", "aria-label": "Token" });
	help = [
		["j / k", "next / previous group"], ["[ / ]", "previous / next completion"], ["arrows", "next token, in a text"],
	];

	/** @param {HTMLElement} container @param {Place} place @param {Context} context */
	constructor(container, place, context) {
		this.context = context;
		this.run = context.run;
		this.index = new GroupIndex(this.run);
		const follow = (rel) => () => this.links.querySelector(`[rel=${rel}]`)?.click();
		const back = () => {
			if (this.token === null || !this.record) context.navigate(this.address());
			else this.choose(this.completion, null);
		};
		this.keys = {
			"j": follow("next"), "k": follow("prev"), "[": () => this.step(-1), "]": () => this.step(1), "Escape": back,
		};
		fill(container, this.links, h("div.group", this.page, this.panel));
		this.route(place);
	}

	/** @param {(number | null | undefined)[]} path */
	address(...path) {
		const steps = ["groups", ...path].filter((step) => !missing(step));
		return this.context.link(`#/${steps.join("/")}?${this.query}`);
	}

	/** @param {Place} place */
	route({ path, query }) {
		const [, group, completion = null, token = null] = path.map((text) => (/^\d+$/.test(text) ? Number(text) : null));
		Object.assign(this, { query, completion, token });
		if (group !== this.id) this.load(group);
		else if (this.record) this.draw();
		return true;
	}

	/** @param {number} id */
	async load(id) {
		const reason = "The values of the tokens are loading.";
		Object.assign(this, { id, record: null, values: [], reason, compared: {} });
		this.pages.clear();
		this.unfolded.clear();
		this.panel.hidden = true;
		this.neighbours();
		const failed = (error) => ({ error: error.message });
		const loading = this.run.get(`groups/${id}/tokens`).catch(failed);
		const found = await this.run.get(`groups/${id}`).catch(failed);
		if (this.id !== id) return;
		if (found.error) {
			fill(this.page, problem(found.error));
			return;
		}
		this.record = found;
		this.draw();
		const { completions = [], error = "", reason: absent = error } = await loading;
		if (this.id !== id) return;
		Object.assign(this, { values: completions, reason: absent });
		this.draw();
		if (this.completion !== null) {
			(this.page.querySelector(".selected") ?? this.page.querySelector(".chosen"))?.scrollIntoView({ block: "center" });
		}
	}

	// Links to the groups before and after this one in the filtered list.
	async neighbours() {
		const { rows } = await this.index.select(this.query).catch(() => ({ rows: [] }));
		const { group_id } = this.index.columns;
		const ids = rows.map((row) => group_id[row]);
		const at = ids.indexOf(this.id);
		const link = (rel, to, label) => to !== undefined && h("a", { rel, href: this.address(to) }, `${label} ${to}`);
		const which = active(this.query).length ? "groups that pass the filters" : "groups";
		update(this.links, h("a", { href: this.address() }, "all groups"), at >= 0 && [
			link("prev", ids[at - 1], "↑ group"), link("next", ids[at + 1], "↓ group"),
			h("span.muted", `${number(at + 1)} of ${number(ids.length)} ${which}`)]);
	}

	/** @param {string} key @param {string | false} value */
	set(key, value) {
		if (value) this.query.set(key, value);
		else this.query.delete(key);
		this.go(this.completion, this.token);
	}

	/** @param {number} completion @param {number | null} token */
	go(completion, token, render = () => this.draw()) {
		Object.assign(this, { completion, token });
		history.replaceState(null, "", this.address(this.id, completion, token));
		render();
	}

	// Positions of the completions, from the highest to the lowest reward.
	ranking() {
		const { completions } = this.record;
		const reward = (i) => completions[i].reward ?? -Infinity;
		return completions.map((_, i) => i).sort((a, b) => reward(b) - reward(a) || a - b);
	}

	// Positions of the completions in the order of their rewards, those of the same text together.
	byText() {
		const found = /** @type {Map<string, number[]>} */ (new Map());
		for (const i of this.ranking()) {
			const { text } = this.record.completions[i];
			found.set(text, [...(found.get(text) ?? []), i]);
		}
		return [...found.values()];
	}

	// The compared completions: those of the address, else the best one and the worst one of another text.
	pair() {
		const [texts, wanted] = [this.byText(), this.query.get("diff")];
		if (wanted !== null) return wanted.split("-").filter((i) => i in this.record.completions).map(Number);
		return texts.length > 1 ? [texts[0][0], texts.flat().findLast((i) => !texts[0].includes(i))] : [];
	}

	/** @param {string} name */
	isShown(name) {
		return this.query.get(name) === "yes";
	}

	/** @param {string} text */
	shown(text) {
		return this.isShown("symbols") ? visible(text) : text;
	}

	get chosen() {
		return this.completion ?? this.ranking()[0];
	}

	get overlay() {
		const name = this.query.get("overlay");
		return Object.hasOwn(OVERLAYS, name) ? name : "sampled_logprob";
	}

	draw() {
		const [order, { completions }] = [this.ranking(), this.record];
		const focused = /** @type {HTMLElement} */ (document.activeElement).dataset.key;
		const scale = scaleOf(this.overlay, this.values, this.query.get("scale") === "rank");
		const all = completions.reduce((sum, { text }) => sum + text.length, 0) <= ALL;
		const card = (i) => this.card(i, all || i === this.chosen, scale);
		const others = (first, same) => {
			const fold = h("details.same", {
				open: this.unfolded.has(first) || same.includes(this.completion),
				ontoggle: () => { this.unfolded[fold.open ? "add" : "delete"](first); },
			}, h("summary", `${same.length} × the same text: `, same.map((i) => ` #${i}`)), same.map(card));
			return fold;
		};
		fill(this.page, this.heading(), order.length > 1 && this.difference(order),
			order.length > 0 && [this.summary(order), this.controls(scale)],
			this.byText().map(([first, ...same]) => [card(first), same.length > 0 && others(first, same)]));
		this.page.querySelector(`[data-key="${focused}"]`)?.focus({ preventScroll: true });
		this.pick();
	}

	heading() {
		const { prompt, answer, step, type, environment, detail, outcome, reason } = this.record;
		const text = (name, value) => h("pre.text", { class: `text ${name}`, tabindex: "0", "aria-label": name }, value);
		return [
			h("h1", `Group ${this.id}`),
			h("p.toolbar", state(reason ?? outcome), `step ${step}`, h("span", type),
				environment && `environment ${environment}`),
			detail && h("p.error", detail),
			h("h2.sr", "Prompt and completions"),
			h("section.card", h("h3", "Prompt"), text("prompt", this.shown(prompt.slice(0, CHARACTERS))),
				prompt.length > CHARACTERS && `… ${number(prompt.length - CHARACTERS)} more characters`,
				h("h3", "Expected answer"), text("answer", this.shown(answer.slice(0, CHARACTERS)) || MISSING)),
		];
	}

	/** @param {number[]} order */
	summary(order) {
		const { completions } = this.record;
		const applied = ({ parts }) => Object.keys(parts).filter((part) => !missing(parts[part]));
		const names = [...new Set(completions.flatMap(applied))];
		const cells = (tag, scope, texts) => texts.map((text) => h(tag, { scope }, text));
		const row = (i) => {
			const { reward, parts, advantage, finish_reason: stop, tokens, ...seen } = completions[i];
			const values = [reward, ...names.map((name) => parts[name]), advantage].map((value) => number(value, 4));
			return h("tr", { "aria-current": i === this.chosen && "true" }, cells("td", null, [
				h("a", { href: this.address(this.id, i) }, `#${i}`), ...values,
				stop === "length" ? state("length: truncated") : stop, number(tokens),
				versions(seen.first_version, seen.last_version)]));
		};
		const titles = ["completion", "reward", ...names, "advantage", "stop", "tokens", "versions"];
		return h("div", { class: "table-wrap card", tabindex: "0", role: "region", "aria-label": "Completions" },
			h("table.completions", h("thead", h("tr", cells("th", "col", titles))), h("tbody", order.map(row))));
	}

	/** @param {any} scale */
	controls(scale) {
		const [name, { query }] = [this.overlay, this];
		const symbols = h("input", { type: "checkbox", "data-key": "symbols", checked: this.isShown("symbols"),
			onchange: () => this.set("symbols", symbols.checked && "yes") });
		const note = this.reason || (!scale && name !== "none" && "No token of this group has this value.");
		return h("section.card", h("div.toolbar",
			menu("Colour tokens by", name, Object.entries(OVERLAYS), (value) => this.set("overlay", value)),
			name.endsWith("logprob") && menu("Scale", query.get("scale") ?? "", SCALES, (value) => this.set("scale", value)),
			h("label", symbols, "show control characters and spaces")),
		scale && legend(name, scale), note && h("p.muted", note));
	}

	/** The choice of two completions, and what differs between them. @param {number[]} order */
	difference(order) {
		const [[a, b], { completions }, { values }] = [this.pair(), this.record, this];
		const level = this.query.get("level") ?? LEVELS[0];
		const names = order.map((i) => [i, `#${i} (reward ${number(completions[i].reward, 4)})`]);
		const other = (value) => b ?? order.findLast((i) => i !== Number(value));
		const first = menu("Compare", a ?? "none", [["none", "nothing"], ...names], (value) =>
			this.set("diff", value === "none" ? value : `${value}-${other(value)}`));
		if (missing(b)) return this.byText().length > 1 && h("section.card", h("div.toolbar", first));
		const menus = h("div.toolbar", first, menu("with", b, names, (value) => this.set("diff", `${a}-${value}`)),
			menu("by", level, LEVELS.map((one) => [one, one]), (value) => this.set("level", value)));
		const key = [a, b, level, Boolean(values[a] && values[b])].join();
		if (this.compared.key !== key) {
			const [left, right] = [a, b].map((i) => ({ text: completions[i].text, tokens: values[i]?.text }));
			this.compared = { key, ...compare(left, right, level) };
		}
		const what = this.compared.runs.some(([kind]) => kind) ? ` compared by ${this.compared.level}` : " equal texts";
		return h("section.card", { "aria-label": "Difference" }, menus,
			h("p", h("del", `only in #${a}`), " ", h("ins", `only in #${b}`), h("span.muted", what)),
			diffView(this.compared, this.isShown("symbols")));
	}

	/** The text of a completion, one page at a time: tokens if their values exist, else plain text. A closed card shows
	 * the beginning. @param {number} i @param {boolean} isOpen @param {any} scale */
	card(i, isOpen, scale) {
		const { text, reward, turns = [] } = this.record.completions[i];
		const letters = turns.length ? [...text] : text;
		const odd = hidden(text);
		const tokens = isOpen && this.values[i];
		const [size, total, unit] = tokens ? [TOKENS, tokens.text.length, "tokens"]
			: [isOpen ? CHARACTERS : 400, letters.length, "characters"];
		const at = this.pages.get(i) ?? (tokens && i === this.completion ? Math.floor(this.token / size) : 0);
		const [start, stop] = [at * size, Math.min(total, (at + 1) * size)];
		const turn = (to, label) => h("button.button.small", { disabled: to < 0 || to * size >= total, onclick: () => {
			this.pages.set(i, to);
			this.draw();
		} }, label);
		const how = { name: this.overlay, scale, symbols: this.isShown("symbols") };
		const plain = (from, to) => this.shown([letters.slice(from, to)].flat().join(""));
		const show = tokens ? (from, to) => elements(tokens, from, to, how) : plain;
		return h("article", { class: i === this.chosen ? "card chosen" : "card" },
			h("h3.toolbar", h("a", { href: this.address(this.id, i) }, `Completion #${i}`),
				h("span.muted", `reward ${number(reward, 4)}`),
				odd && h("span.chip", { title: "Characters without a glyph" }, odd)),
			h("pre.text", { tabindex: "0", "data-key": `text ${i}`, "aria-label": `Completion ${i}`, role: "group",
				onclick: ({ target }) => target.at !== undefined && this.choose(i, target.at),
				onkeydown: (event) => this.moved(event, i) },
			inTurns(turns, unit, start, stop, show)),
			total > size && h("p.toolbar", isOpen && [turn(at - 1, "before"), turn(at + 1, "after")],
				`${number(start + 1)} to ${number(stop)} of ${number(total)} ${unit}`));
	}

	/** @param {number} i @param {number | null} at */
	element(i, at) {
		return [...this.page.querySelector(`[data-key="text ${i}"]`).children].find((child) => child.at === at);
	}

	// Mark the chosen token, and show its values.
	pick() {
		const { page, panel, completion, token } = this;
		const tokens = this.values[completion];
		page.querySelector(".selected")?.classList.remove("selected");
		panel.hidden = token === null || !(token < tokens?.text.length);
		if (panel.hidden) return;
		this.element(completion, token)?.classList.add("selected");
		this.element(completion, token)?.scrollIntoView({ block: "nearest" });
		const unpick = () => this.choose(completion, null);
		const close = h("button.button.small", { "aria-label": "Close", onclick: unpick }, "×");
		fill(panel, h("h3.toolbar", `Token ${token} of completion #${completion}`, close), tokenTable(tokens, token),
			h("a", { href: this.address(this.id, completion, token) }, "Link to this token"));
	}

	/** Another completion, or another page of the same one, needs new elements.
	 * @param {number} i @param {number | null} at */
	choose(i, at) {
		const isDrawn = i === this.completion && (at === null || this.element(i, at));
		if (!isDrawn) this.pages.delete(i);
		this.go(i, at, () => (isDrawn ? this.pick() : this.draw()));
	}

	/** @param {any} event @param {number} i */
	moved(event, i) {
		const last = this.values[i]?.text.length - 1;
		const from = i === this.completion ? this.token ?? -1 : -1;
		// The token at the same place of the next line or the line before.
		const line = (by) => {
			const { left, top, height } = (this.element(i, from) ?? event.currentTarget).getBoundingClientRect();
			const y = top + height / 2 + by * parseFloat(getComputedStyle(event.currentTarget).lineHeight);
			const found = /** @type {any} */ (document.elementFromPoint(left + 2, y));
			return found?.at ?? from + by;
		};
		const moves = {
			ArrowLeft: () => from - 1, ArrowRight: () => from + 1, ArrowUp: () => line(-1), ArrowDown: () => line(1),
			Home: () => 0, End: () => last,
		};
		if (!(last >= 0) || !moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
		event.preventDefault();
		this.choose(i, Math.max(0, Math.min(last, moves[event.key]())));
	}

	/** @param {number} by */
	step(by) {
		const order = this.record && this.ranking();
		const next = order?.[order.indexOf(this.chosen) + by];
		if (missing(next)) return;
		this.go(next, null);
		this.page.querySelector(".chosen").scrollIntoView({ block: "nearest" });
	}

	update(run, changed) {
		if (run === this.run && changed.includes("groups")) this.neighbours();
	}

	close() {
		this.id = null;
	}
}

/** @param {string} label @param {any} value @param {any[][]} options @param {(value: string) => void} act */
function menu(label, value, options, act) {
	const field = h("select", { "data-key": label, onchange: () => act(field.value) },
		options.map(([key, text]) => h("option", { value: key }, text)));
	field.value = value;
	return h("label", label, field);
}
