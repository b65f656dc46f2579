// The list of all groups. Filters, search and order are in the address. Only rows near the screen are elements.
import { fill, h } from "./element.js";
import { active, CHOICES, COLUMNS, GroupIndex, RANGES } from "./filters.js";
import { number } from "./format.js";
import { state, versions } from "./text.js";

const OVERSCAN = 12; // rows beyond each end of the screen
const left = {}; // where the list was left

export function show(container, { query }, context) {
	let [searches, timer, added, counted] = [0, 0, 0, ""];
	const index = new GroupIndex(context);
	const list = table((id) => context.link(`#/groups/${id}?${query}`), (column) =>
		set("sort", query.get("sort") === `-${column}` ? column : `-${column}`));
	const status = h("span", { role: "status", class: "muted" }, "loading");
	const chips = h("div.toolbar");
	const choices = h("div");
	const field = (key, attributes) => h("input", { "aria-label": key.replace("_", " "), "data-key": key, ...attributes, value: query.get(key) ?? "",
		oninput: ({ target }) => set(key, target.value, 150) });
	const text = field("text", { type: "search", placeholder: "Search in prompts, answers, completions" });
	const fields = Object.keys(RANGES).map((name) => h("label.range", name,
		["min", "max"].map((end) => field(`${end}_${name}`, { type: "number", step: "any", placeholder: end }))));
	fill(container, h("h1", "Groups"), h("div.toolbar.search", text, status),
		h("details.card", { open: innerWidth >= 900 }, h("summary", "Filters"), choices, h("div.toolbar", fields)),
		chips, list.element);

	function set(key, value, delay) {
		if (value) query.set(key, value);
		else query.delete(key);
		changed(delay);
	}

	function changed(delay = 0) {
		history.replaceState(null, "", context.link(`#/groups?${query}`));
		clearTimeout(timer);
		timer = setTimeout(refresh, delay);
	}

	async function refresh() {
		const search = ++searches;
		const found = await index.select(query).catch((error) => ({ rows: [], error: error.message }));
		if (search !== searches) return;
		const { length, columns } = index.groups;
		[added, counted] = [0, found.error ?? `${found.rows.length < length ? `${number(found.rows.length)} of ` : ""}${number(length)} groups${index.dropped ? `; the first ${number(index.dropped)} groups are in rollouts.jsonl only` : ""}`];
		status.textContent = counted;
		if (found.counts) choose(found.counts);
		list.set(columns, found.rows, query.get("sort") ?? "-group_id");
		if (left.address === String(query)) scrollTo(0, left.top);
		left.address = null;
	}

	// Buttons that switch values on and off, with the number of groups of each value.
	function choose(counts) {
		const focused = document.activeElement.dataset.key;
		const toggle = (key, value) => () => {
			if (query.has(key, value)) query.delete(key, value);
			else query.append(key, value);
			for (const input of container.querySelectorAll("input")) input.value = query.get(input.dataset.key) ?? "";
			changed();
		};
		const button = (key, value, label, ...more) => h("button.chip", { "data-key": `${key} ${value}`, onclick: toggle(key, value),
			"aria-pressed": String(query.has(key, value)) }, label, more);
		fill(choices, CHOICES.map((name, i) => (counts[i].size > 1 || query.has(name)) && h("div.toolbar.choices", { role: "group", "aria-label": name },
			h("span.muted", name), [...new Set([...counts[i].keys(), ...query.getAll(name)])].sort().map((value) =>
				button(name, value, name === "outcome" ? value.replaceAll("_", " ") : value, h("b", counts[i].get(value) ?? 0))))),
		h("div.toolbar.choices", h("span.muted", "length"), button("truncated", "yes", "truncated only")));
		const filters = active(query);
		fill(chips, filters.map(([key, value, label]) => button(key, value, `${label} ×`)), filters.length > 0 && h("button.button.small", { onclick: () => {
			for (const [key, value] of filters) toggle(key, value)();
		} }, "Reset"));
		container.querySelector(`[data-key="${CSS.escape(focused ?? "")}"]`)?.focus();
	}

	refresh();
	return {
		// A list that is scrolled does not move when groups are added. Its next change includes them.
		update(kind, data) {
			if (kind !== "groups") return;
			added += index.groups.add(data);
			index.text = undefined;
			if (list.element.getBoundingClientRect().top > 0) refresh();
			else if (added) status.textContent = `${counted} (${number(added)} new)`;
		},
		close() {
			searches += 1;
			clearTimeout(timer);
			Object.assign(left, { address: String(query), top: scrollY });
			list.close();
		},
		keys: { "j": () => list.move(1), "k": () => list.move(-1), "/": () => text.focus() },
		help: [["j / k", "next / previous group"], ["Enter", "open the group"]],
	};
}

function extent(values = []) {
	return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [0, 0]);
}

// A bar from 0 to a number, and the number.
function bar(value, [low, high]) {
	const at = (end) => (100 * (end - low)) / (high - low || 1);
	const style = { left: `${at(Math.min(0, value))}%`, width: `${Math.abs(at(value ?? 0) - at(0))}%` };
	return [h("span.line", h("i", { style })), number(value)];
}

// The table of groups. link(id): address of a group. sort(column): sort by a column.
function table(link, sort) {
	const head = h("div.row.head", { role: "row" }, Object.entries(COLUMNS).map(([column, title]) =>
		h("span", { class: column, role: "columnheader" }, h("button", { onclick: () => sort(column) }, title))));
	const body = h("div.rows", { role: "rowgroup" });
	const element = h("div", { role: "table", "aria-label": "Groups" }, head, body);
	const shown = new Map();
	let [columns, rows, bars, current] = [{}, [], {}, -1];
	const height = () => parseFloat(getComputedStyle(body).getPropertyValue("--row"));

	function build(at) {
		const value = (name) => columns[name][rows[at]];
		const id = value("group_id");
		const contents = {
			group_id: h("a", { href: link(id) }, id), outcome: state(value("outcome")), prompt: value("prompt"),
			version_min: versions(value("version_min"), value("version_max")),
		};
		return h("div.row", { role: "row", "aria-rowindex": at + 2, style: { transform: `translateY(${at * height()}px)` } },
			Object.keys(COLUMNS).map((name) => h("span", { class: name, role: "cell" },
				contents[name] ?? (bars[name] ? bar(value(name), bars[name]) : number(value(name))))));
	}

	function draw() {
		const [{ top }, size] = [body.getBoundingClientRect(), height()];
		const first = Math.max(0, Math.floor(-top / size) - OVERSCAN);
		const last = Math.min(rows.length, Math.ceil((innerHeight - top) / size) + OVERSCAN);
		for (const [at, row] of shown) if ((at < first || at >= last) && shown.delete(at)) row.remove();
		for (let at = last - 1; at >= first; at -= 1) {
			if (shown.has(at)) continue;
			shown.set(at, build(at));
			body.insertBefore(shown.get(at), shown.get(at + 1) ?? null);
		}
	}

	function again() {
		shown.clear();
		fill(body, rows.length === 0 && h("p.empty",
			columns.group_id?.length ? "No group passes the filters." : "No group has ended yet, or monitor.rollouts is off."));
		body.style.height = `${Math.max(2, rows.length) * height()}px`;
		draw();
	}

	addEventListener("scroll", draw, { passive: true });
	addEventListener("resize", again);
	return {
		element,
		set(newColumns, newRows, order) {
			[columns, rows, current] = [newColumns, newRows, -1];
			bars = { reward_mean: extent(columns.reward_mean), reward_spread: extent(columns.reward_spread) };
			for (const cell of head.children) cell.setAttribute("aria-sort", { [cell.className]: "ascending", [`-${cell.className}`]: "descending" }[order] ?? "none");
			element.setAttribute("aria-rowcount", rows.length + 1);
			element.className = columns.environment?.some(Boolean) ? "groups" : "groups alone";
			again();
		},
		move(by) {
			current = Math.max(0, Math.min(rows.length - 1, current + by));
			if (!shown.has(current)) scrollBy(0, body.getBoundingClientRect().top + current * height() - innerHeight / 2);
			draw();
			shown.get(current)?.scrollIntoView({ block: "nearest" });
			shown.get(current)?.querySelector("a").focus({ preventScroll: true });
		},
		close() {
			removeEventListener("scroll", draw);
			removeEventListener("resize", again);
		},
	};
}
