// One group: its prompt and outcome, its completions with the values of every token, and the diff of two completions.
import { compare, diffView, LEVELS } from "./diff.js";
import { fill, h, problem } from "./element.js";
import { active, GroupIndex } from "./filters.js";
import { MISSING, missing, number } from "./format.js";
import { hidden, state, versions, visible } from "./text.js";
import { elements, legend, OVERLAYS, scaleOf, tokenTable } from "./tokens.js";

const TOKENS = 4000; // tokens on one page of a completion
const CHARACTERS = 40000; // characters on one page of a text without tokens
const ALL = 20000; // characters of a group whose completions are all open

export function show(container, parameters, context) {
	const index = new GroupIndex(context);
	let [id, completion, token, query, record, values, reason, pages, unfolded, compared] = [];
	const links = h("div.toolbar.links");
	const page = h("div");
	const panel = h("aside.card.panel", { hidden: true, "aria-live": "polite", "aria-label": "Token" });
	fill(container, links, h("div.group", page, panel));

	function address(...path) {
		return context.link(`#/${["groups", ...path].filter((step) => !missing(step)).join("/")}?${query}`);
	}

	function set(key, value) {
		if (value) query.set(key, value);
		else query.delete(key);
		go(completion, token);
	}

	function go(i, at, render = draw) {
		[completion, token] = [i, at];
		history.replaceState(null, "", address(id, completion, token));
		render();
	}

	async function load() {
		const wanted = id;
		const current = () => id === wanted;
		[record, values, reason, pages, unfolded, compared] = [null, [], "The values of the tokens are loading.", new Map(), new Set(), {}];
		panel.hidden = true;
		neighbours();
		const failed = (error) => ({ error: error.message });
		const loading = index.api(`/${id}/tokens`).catch(failed);
		const found = await index.api(`/${id}`).catch(failed);
		if (!current()) return;
		if (found.error) {
			fill(page, problem(found.error));
			return;
		}
		record = found;
		draw();
		const { completions = [], error = "", reason: absent = error } = await loading;
		if (!current()) return;
		[values, reason] = [completions, absent];
		draw();
		if (completion !== null) (page.querySelector(".selected") ?? page.querySelector(".chosen"))?.scrollIntoView({ block: "center" });
	}

	// Links to the groups before and after this one in the filtered list.
	async function neighbours() {
		const { rows } = await index.select(query).catch(() => ({ rows: [] }));
		const ids = rows.map((row) => index.groups.columns.group_id[row]);
		const at = ids.indexOf(id);
		const link = (rel, to, label) => to !== undefined && h("a", { rel, href: address(to) }, `${label} ${to}`);
		fill(links, h("a", { href: address() }, "all groups"), at >= 0 && [link("prev", ids[at - 1], "↑ group"), link("next", ids[at + 1], "↓ group"),
			h("span.muted", `${number(at + 1)} of ${number(ids.length)} ${active(query).length ? "groups that pass the filters" : "groups"}`)]);
	}

	// Positions of the completions, from the highest to the lowest reward.
	function ranking() {
		const reward = (i) => record.completions[i].reward ?? -Infinity;
		return record.completions.map((_, i) => i).sort((a, b) => reward(b) - reward(a) || a - b);
	}

	// Positions of the completions in the order of their rewards, those of the same text together.
	function byText() {
		const found = new Map();
		for (const i of ranking()) found.set(record.completions[i].text, [...(found.get(record.completions[i].text) ?? []), i]);
		return [...found.values()];
	}

	// The compared completions: those of the address, else the best one and the worst one of another text.
	function pair() {
		const texts = byText();
		const ends = texts.length > 1 ? [texts[0][0], texts.flat().findLast((i) => !texts[0].includes(i))] : [];
		return query.has("diff") ? query.get("diff").split("-").filter((i) => i in record.completions).map(Number) : ends;
	}

	const isShown = (name) => query.get(name) === "yes";
	const shown = (text) => (isShown("symbols") ? visible(text) : text);
	const chosen = () => completion ?? ranking()[0];
	const name = () => (Object.hasOwn(OVERLAYS, query.get("overlay")) ? query.get("overlay") : "sampled_logprob");

	function draw() {
		const order = ranking();
		const focused = document.activeElement.dataset.key;
		const scale = scaleOf(name(), values, query.get("scale") === "rank");
		const open = (i) => all || i === chosen();
		const all = record.completions.reduce((sum, { text }) => sum + text.length, 0) <= ALL;
		fill(page, heading(), order.length > 1 && difference(order), order.length > 0 && [summary(order), controls(scale)],
			byText().map(([first, ...same]) => [card(first, open(first), scale), same.length > 0 && h("details.same", {
				open: unfolded.has(first) || same.includes(completion), ontoggle: ({ target }) => unfolded[target.open ? "add" : "delete"](first),
			}, h("summary", `${same.length} × the same text: `, same.map((i) => ` #${i}`)), same.map((i) => card(i, open(i), scale)))]));
		page.querySelector(`[data-key="${focused}"]`)?.focus({ preventScroll: true });
		pick();
	}

	function heading() {
		const { prompt, answer, step, type, environment, detail, outcome, reason: discarded } = record;
		return [
			h("h1", `Group ${id}`),
			h("p.toolbar", state(discarded ?? outcome), `step ${step}`, h("span", type), environment && `environment ${environment}`),
			detail && h("p.error", detail),
			h("section.card", h("h3", "Prompt"), h("pre.text.prompt", shown(prompt.slice(0, CHARACTERS)),
				prompt.length > CHARACTERS && `… ${number(prompt.length - CHARACTERS)} more characters`),
			h("h3", "Expected answer"), h("pre.text.answer", shown(answer.slice(0, CHARACTERS)) || MISSING)),
		];
	}

	function summary(order) {
		const applied = ({ parts: own }) => Object.keys(own).filter((part) => !missing(own[part]));
		const parts = [...new Set(record.completions.flatMap(applied))];
		const cells = (tag, scope, texts) => texts.map((text) => h(tag, { scope }, text));
		const row = (i) => {
			const { reward, parts: own, advantage, finish_reason, tokens, first_version, last_version } = record.completions[i];
			return h("tr", { "aria-current": i === chosen() && "true" }, cells("td", null, [
				h("a", { href: address(id, i) }, `#${i}`), ...[reward, ...parts.map((part) => own[part]), advantage].map((value) => number(value, 4)),
				finish_reason === "length" ? state("length: truncated") : finish_reason, number(tokens), versions(first_version, last_version)]));
		};
		return h("div", { class: "table-wrap card" }, h("table.completions", h("thead", h("tr",
			cells("th", "col", ["completion", "reward", ...parts, "advantage", "stop", "tokens", "versions"]))), h("tbody", order.map(row))));
	}

	function menu(label, value, options, act) {
		const field = h("select", { "data-key": label, onchange: () => act(field.value) }, options.map(([key, text]) => h("option", { value: key }, text)));
		field.value = value;
		return h("label", label, field);
	}

	function controls(scale) {
		const symbols = h("input", { type: "checkbox", "data-key": "symbols", checked: isShown("symbols"), onchange: () => set("symbols", symbols.checked && "yes") });
		const note = reason || (!scale && name() !== "none" && "No token of this group has this value.");
		return h("section.card", h("div.toolbar",
			menu("Colour tokens by", name(), Object.entries(OVERLAYS), (value) => set("overlay", value)),
			name().endsWith("logprob") && menu("Scale", query.get("scale") ?? "", [["", "fixed"], ["rank", "rank in the group"]], (value) => set("scale", value)),
			h("label", symbols, "show control characters and spaces")),
		scale && legend(name(), scale), note && h("p.muted", note));
	}

	// The choice of two completions, and what differs between them.
	function difference(order) {
		const [a, b] = pair();
		const level = query.get("level") ?? LEVELS[0];
		const names = order.map((i) => [i, `#${i} (reward ${number(record.completions[i].reward, 4)})`]);
		const other = (value) => b ?? order.findLast((i) => i !== Number(value));
		const menus = h("div.toolbar", menu("Compare", a ?? "none", [["none", "nothing"], ...names], (value) => set("diff", value === "none" ? value : `${value}-${other(value)}`)),
			!missing(b) && [menu("with", b, names, (value) => set("diff", `${a}-${value}`)), menu("by", level, LEVELS.map((one) => [one, one]), (value) => set("level", value))]);
		if (missing(b)) return byText().length > 1 && h("section.card", menus);
		const key = [a, b, level, Boolean(values[a] && values[b])].join();
		if (compared.key !== key) {
			const [left, right] = [a, b].map((i) => ({ text: record.completions[i].text, tokens: values[i]?.text }));
			compared = { key, ...compare(left, right, level) };
		}
		return h("section.card", { "aria-label": "Difference" }, menus, h("p", h("del", `only in #${a}`), " ", h("ins", `only in #${b}`),
			h("span.muted", compared.runs.some(([kind]) => kind) ? ` compared by ${compared.level}` : " equal texts")), diffView(compared, isShown("symbols")));
	}

	// The text of a completion, one page at a time: tokens if their values exist, else plain text. A closed card shows the begin.
	function card(i, isOpen, scale) {
		const { text, reward } = record.completions[i];
		const odd = hidden(text);
		const tokens = isOpen && values[i];
		const [size, total, unit] = tokens ? [TOKENS, tokens.text.length, "tokens"] : [isOpen ? CHARACTERS : 400, text.length, "characters"];
		const at = pages.get(i) ?? (tokens && i === completion ? Math.floor(token / size) : 0);
		const turn = (to, label) => h("button.button.small", { disabled: to < 0 || to * size >= total, onclick: () => draw(pages.set(i, to)) }, label);
		return h("article", { class: i === chosen() ? "card chosen" : "card" },
			h("h3.toolbar", h("a", { href: address(id, i) }, `Completion #${i}`), h("span.muted", `reward ${number(reward, 4)}`),
				odd && h("span.chip", { title: "Characters without a glyph" }, odd)),
			h("pre.text", { tabindex: "0", "data-key": `text ${i}`, "data-completion": i, "aria-label": `Completion ${i}`, onclick: picked, onkeydown: moved },
				tokens ? elements(tokens, at * size, (at + 1) * size, { name: name(), scale, symbols: isShown("symbols") }) : shown(text.slice(at * size, (at + 1) * size))),
			total > size && h("p.toolbar", isOpen && [turn(at - 1, "before"), turn(at + 1, "after")],
				`${number(at * size + 1)} to ${number(Math.min(total, (at + 1) * size))} of ${number(total)} ${unit}`));
	}

	function element(i, at) {
		return [...page.querySelector(`[data-key="text ${i}"]`).children].find((child) => child.at === at);
	}

	// Mark the chosen token, and show its values.
	function pick() {
		page.querySelector(".selected")?.classList.remove("selected");
		const tokens = values[completion];
		panel.hidden = token === null || !(token < tokens?.text.length);
		if (panel.hidden) return;
		element(completion, token)?.classList.add("selected");
		element(completion, token)?.scrollIntoView({ block: "nearest" });
		fill(panel, h("h3.toolbar", `Token ${token} of completion #${completion}`,
			h("button.button.small", { "aria-label": "Close", onclick: () => choose(completion, null) }, "×")),
		tokenTable(tokens, token), h("a", { href: address(id, completion, token) }, "Link to this token"));
	}

	// Another completion, or another page of the same one, needs new elements.
	function choose(i, at) {
		const isDrawn = i === completion && (at === null || element(i, at));
		if (!isDrawn) pages.delete(i);
		go(i, at, isDrawn ? pick : draw);
	}

	function picked({ target, currentTarget }) {
		if (target.at !== undefined) choose(Number(currentTarget.dataset.completion), target.at);
	}

	function moved(event) {
		const i = Number(event.currentTarget.dataset.completion);
		const last = values[i]?.text.length - 1;
		const from = i === completion ? token ?? -1 : -1;
		// The token at the same place of the next line or the line before.
		const line = (by) => {
			const { left, top, height } = (element(i, from) ?? event.currentTarget).getBoundingClientRect();
			return document.elementFromPoint(left + 2, top + height / 2 + by * parseFloat(getComputedStyle(event.currentTarget).lineHeight))?.at ?? from + by;
		};
		const moves = { ArrowLeft: () => from - 1, ArrowRight: () => from + 1, ArrowUp: () => line(-1), ArrowDown: () => line(1), Home: () => 0, End: () => last };
		if (!(last >= 0) || !moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
		event.preventDefault();
		choose(i, Math.max(0, Math.min(last, moves[event.key]())));
	}

	function step(by) {
		const next = record && ranking()[ranking().indexOf(chosen()) + by];
		if (missing(next)) return;
		go(next, null);
		page.querySelector(".chosen").scrollIntoView({ block: "nearest" });
	}

	function route(next) {
		const [, group, ...place] = next.path.map((text) => (/^\d+$/.test(text) ? Number(text) : null));
		query = next.query;
		[completion = null, token = null] = place;
		if (group !== id) load((id = group));
		else if (record) draw();
		return true;
	}

	const follow = (rel) => () => links.querySelector(`[rel=${rel}]`)?.click();
	route(parameters);
	return {
		update(kind, data) {
			if (kind !== "groups") return;
			index.groups.add(data);
			neighbours();
		},
		route,
		close() {
			id = null;
		},
		keys: {
			"j": follow("next"), "k": follow("prev"), "[": () => step(-1), "]": () => step(1),
			"Escape": () => (token === null || !record ? context.navigate(address()) : choose(completion, null)),
		},
		help: [["j / k", "next / previous group"], ["[ / ]", "previous / next completion"], ["arrows", "next token, in a text"]],
	};
}
