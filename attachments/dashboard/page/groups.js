// The list of all groups. Filters, search and order are in the address. Only rows near the screen are elements.
import { fill, h, patch, update } from "./element.js";
import { active, CHOICES, COLUMNS, GroupIndex, RANGES } from "./filters.js";
import { number } from "./format.js";
import { state, versions } from "./text.js";

const OVERSCAN = 12; // rows beyond each end of the screen
const left = { address: null, top: 0 }; // where the list was left

export class Groups {
	searches = 0;
	timer = 0;
	counted = "";
	listed = 0;
	status = h("span", { role: "status", class: "muted" }, "loading");
	chips = h("div.toolbar");
	choices = h("div");
	help = [["j / k", "next / previous group"], ["Enter", "open the group"]];

	/** @param {HTMLElement} container @param {Place} place @param {Context} context */
	constructor(container, { query }, { run, link }) {
		this.query = query;
		this.link = link;
		this.run = run;
		this.container = container;
		this.index = new GroupIndex(run);
		this.list = new Table((id) => link(`#/groups/${id}?${query}`), (column) =>
			this.set("sort", query.get("sort") === `-${column}` ? column : `-${column}`));
		const text = this.field("text", { type: "search", placeholder: "Search in prompts, answers, completions" });
		const fields = Object.keys(RANGES).map((name) => h("label.range", name, ["min", "max"].map((end) =>
			this.field(`${end}_${name}`, { type: "number", step: "any", placeholder: end }))));
		const filters = h("details.card", { open: innerWidth >= 900 }, h("summary", "Filters"), this.choices,
			h("div.toolbar", fields));
		for (const place of [this.chips, this.choices]) place.addEventListener("click", (event) => this.clicked(event));
		fill(container, h("h1", "Groups"), h("div.toolbar.search", text, this.status), filters, this.chips,
			this.list.element);
		this.keys = { "j": () => this.list.move(1), "k": () => this.list.move(-1), "/": () => text.focus() };
		this.refresh();
	}

	/** @param {string} key @param {Record<string, string>} attributes */
	field(key, attributes) {
		const field = h("input", { "aria-label": key.replace("_", " "), "data-key": key, ...attributes,
			value: this.query.get(key) ?? "", oninput: () => this.set(key, field.value, 150) });
		return field;
	}

	/** @param {string} key @param {string} value @param {number} [delay] */
	set(key, value, delay) {
		if (value) this.query.set(key, value);
		else this.query.delete(key);
		this.changed(delay);
	}

	changed(delay = 0) {
		history.replaceState(null, "", this.link(`#/groups?${this.query}`));
		clearTimeout(this.timer);
		this.timer = setTimeout(() => this.refresh(), delay);
	}

	async refresh() {
		this.searches += 1;
		const { searches, index, query, list } = this;
		const found = await index.select(query).catch((error) => ({ rows: [], counts: null, error: error.message }));
		if (searches !== this.searches) return;
		const { length, lost } = index.table;
		const passed = found.rows.length < length ? `${number(found.rows.length)} of ` : "";
		const dropped = lost ? `; the first ${number(lost)} groups are in rollouts.jsonl only` : "";
		this.counted = "error" in found ? found.error : `${passed}${number(length)} groups${dropped}`;
		this.listed = length;
		this.status.textContent = this.counted;
		if (found.counts) this.choose(found.counts);
		list.set(index.columns, found.rows, query.get("sort") ?? "-group_id");
		if (left.address === String(query)) scrollTo(0, left.top);
		left.address = null;
	}

	/** Buttons that switch values on and off, with the number of groups of each value.
	 * @param {Map<string, number>[]} counts */
	choose(counts) {
		const { query } = this;
		const button = (key, value, label, ...more) =>
			h("button.chip", { "data-key": `${key} ${value}`, "aria-pressed": String(query.has(key, value)) }, label, more);
		const shown = (name, value) => (name === "outcome" ? value.replaceAll("_", " ") : value);
		const values = (name, i) => [...new Set([...counts[i].keys(), ...query.getAll(name)])].sort().map((value) =>
			button(name, value, shown(name, value), h("b", counts[i].get(value) ?? 0)));
		update(this.choices, CHOICES.map((name, i) => (counts[i].size > 1 || query.has(name))
			&& h("div.toolbar.choices", { role: "group", "aria-label": name }, h("span.muted", name), values(name, i))),
		h("div.toolbar.choices", h("span.muted", "length"), button("truncated", "yes", "truncated only")));
		const filters = active(query);
		update(this.chips, filters.map(([key, value, label]) => button(key, value, `${label} ×`)),
			filters.length > 0 && h("button.button.small", { "data-key": "reset" }, "Reset"));
	}

	/** @param {any} event */
	clicked({ target }) {
		const button = target.closest("button");
		if (!button) return;
		const [key, ...rest] = button.dataset.key.split(" ");
		const switched = key === "reset" ? active(this.query) : [[key, rest.join(" ")]];
		for (const [name, value] of switched) {
			if (this.query.has(name, value)) this.query.delete(name, value);
			else this.query.append(name, value);
		}
		for (const input of this.container.querySelectorAll("input")) input.value = this.query.get(input.dataset.key) ?? "";
		this.changed();
	}

	/** A list that is scrolled does not move when groups are added. Its next change includes them.
	 * @param {Run} run @param {Kind[]} changed */
	update(run, changed) {
		if (run !== this.run || !changed.includes("groups")) return;
		this.index.text = "";
		if (this.list.element.getBoundingClientRect().top > 0) this.refresh();
		else this.status.textContent = `${this.counted} (${number(this.index.table.length - this.listed)} new)`;
	}

	close() {
		this.searches += 1;
		clearTimeout(this.timer);
		Object.assign(left, { address: String(this.query), top: scrollY });
		this.list.close();
	}
}

/** @param {any[]} values @returns {[number, number]} */
const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [0, 0]);

/** A bar from 0 to a number, and the number. @param {number} value @param {[number, number]} range */
function bar(value, [low, high]) {
	const at = (end) => (100 * (end - low)) / (high - low || 1);
	const style = { left: `${at(Math.min(0, value))}%`, width: `${Math.abs(at(value ?? 0) - at(0))}%` };
	return [h("span.line", h("i", { style })), number(value)];
}

// The table of groups. link(id): address of a group. sort(column): sort by a column.
class Table {
	body = h("div.rows", { role: "rowgroup" });
	shown = /** @type {Map<number, HTMLElement>} */ (new Map());
	columns = /** @type {import("./filters.js").GroupColumns} */ (null);
	rows = /** @type {number[]} */ ([]);
	bars = {};
	current = -1;
	none = h("p.empty", { hidden: true });
	scrolled = () => this.draw();
	resized = () => {
		this.body.style.height = `${this.rows.length * this.height}px`;
		this.draw(true);
	};

	/** @param {(id: number) => string} link @param {(column: string) => void} sort */
	constructor(link, sort) {
		this.link = link;
		const titles = Object.entries(COLUMNS).map(([column, title]) =>
			h("span", { class: column, role: "columnheader" }, h("button", { onclick: () => sort(column) }, title)));
		this.head = h("div.row.head", { role: "row" }, titles);
		const head = h("div", { role: "rowgroup" }, this.head);
		this.table = h("div", { role: "table", "aria-label": "Groups" }, head, this.body);
		this.element = h("div", this.table, this.none);
		addEventListener("scroll", this.scrolled, { passive: true });
		addEventListener("resize", this.resized);
	}

	get height() {
		return parseFloat(getComputedStyle(this.body).getPropertyValue("--row"));
	}

	/** @param {number} at @param {number} height */
	build(at, height) {
		const { columns, bars, link } = this;
		const value = (name) => columns[name][this.rows[at]];
		const id = value("group_id");
		const contents = {
			group_id: h("a", { href: link(id) }, id), outcome: state(value("outcome")), prompt: value("prompt"),
			version_min: versions(value("version_min"), value("version_max")),
		};
		const style = { transform: `translateY(${at * height}px)` };
		const cell = (name) => h("span", { class: name, role: "cell" },
			contents[name] ?? (bars[name] ? bar(value(name), bars[name]) : number(value(name))));
		const attributes = { role: "row", "aria-rowindex": at + 2, "data-key": id, style };
		return h("div.row", attributes, Object.keys(COLUMNS).map(cell));
	}

	/** again: rows that are shown can differ. @param {boolean} [again] */
	draw(again) {
		const { body, rows, shown, height } = this;
		const { top } = body.getBoundingClientRect();
		const first = Math.max(0, Math.floor(-top / height) - OVERSCAN);
		const last = Math.min(rows.length, Math.ceil((innerHeight - top) / height) + OVERSCAN);
		for (const [at, row] of shown) if ((at < first || at >= last) && shown.delete(at)) row.remove();
		for (let at = last - 1; at >= first; at -= 1) {
			const next = shown.get(at + 1) ?? null;
			if (!shown.has(at)) shown.set(at, this.build(at, height));
			else if (again) patch(shown.get(at), this.build(at, height));
			const row = shown.get(at);
			if (!row.parentNode || row.nextSibling !== next) body.insertBefore(row, next);
		}
	}

	/** @param {import("./filters.js").GroupColumns} columns @param {number[]} rows @param {string} order */
	set(columns, rows, order) {
		const { head, body, table, none, height } = this;
		const places = new Map(rows.map((row, at) => [columns.group_id[row], at]));
		Object.assign(this, { columns, rows, current: -1 });
		this.bars = { reward_mean: extent(columns.reward_mean), reward_spread: extent(columns.reward_spread) };
		for (const cell of head.children) {
			const sorted = { [cell.className]: "ascending", [`-${cell.className}`]: "descending" };
			cell.setAttribute("aria-sort", sorted[order] ?? "none");
		}
		table.setAttribute("aria-rowcount", rows.length + 1);
		table.className = columns.environment.some(Boolean) ? "groups" : "groups alone";
		none.textContent = columns.group_id.length ? "No group passes the filters."
			: "No group has ended yet, or monitor.rollouts is off.";
		none.hidden = rows.length > 0;
		const [kept, gone] = [new Map(), []];
		for (const row of this.shown.values()) {
			const at = places.get(Number(row.dataset.key));
			if (at === undefined) gone.push(row);
			else kept.set(at, row);
		}
		for (const row of gone) row.remove();
		this.shown = kept;
		body.style.height = `${rows.length * height}px`;
		this.draw(true);
	}

	/** @param {number} by */
	move(by) {
		const { body, shown, rows } = this;
		this.current = Math.max(0, Math.min(rows.length - 1, this.current + by));
		const top = body.getBoundingClientRect().top + this.current * this.height;
		if (!shown.has(this.current)) scrollBy(0, top - innerHeight / 2);
		this.draw();
		shown.get(this.current)?.scrollIntoView({ block: "nearest" });
		/** @type {HTMLElement} */ (shown.get(this.current)?.querySelector("a"))?.focus({ preventScroll: true });
	}

	close() {
		removeEventListener("scroll", this.scrolled);
		removeEventListener("resize", this.resized);
	}
}
