// The overview: state of the run, findings, where every group is, and the charts of all metrics.
import { Board, CHART_HELP } from "./board.js";
import { last, lines } from "./chart.js";
import { command as copied, fill, filterField, h, later, problem, rowHead, update } from "./element.js";
import { bytes, duration, missing, MISSING, number, percent } from "./format.js";

const STAGES = [
	["queued", "queued"], ["decoding", "decoding"], ["scoring", "scoring"], ["waiting", "waiting for the learner"],
];

export class Overview {
	help = CHART_HELP;
	head = h("div");
	leads = h("div.grid.leads");
	where = h("section.card.where");
	sections = h("div");
	heading = h("h2");
	rest = h("div.grid");
	none = h("p.muted");
	filter = filterField("other metrics", () => this.others());
	more = h("details", { ontoggle: () => this.others() }, h("summary", this.heading), this.filter, this.rest);
	drawn = /** @type {Map<string, HTMLElement>} */ (new Map());
	changed = later(250, () => this.draw());

	/** @param {HTMLElement} container @param {Place} _place @param {Context} context */
	constructor(container, _place, { run, link }) {
		this.run = run;
		this.link = link;
		this.board = new Board("step", () => this.marks());
		this.board.zoomed = () => {
			for (const kind of KINDS) this.board.sharpen(run, kind);
		};
		this.keys = { ...this.board.keys, "/": () => { this.more.open = true; this.filter.focus(); } };
		fill(container, this.head, this.board.toolbar({}), this.leads, this.where, this.sections, this.board.quiet,
			this.none, this.more);
		const failed = (error) => fill(this.head, problem(error.message));
		Promise.all([run.describe(), run.load(...KINDS)]).then(() => this.build(), failed);
	}

	marks() {
		const { metrics, evaluations } = this.run.tables;
		const [steps, versions, x] = [metrics.get("step"), metrics.get("policy_version"), this.board.along(metrics)];
		const accuracy = evaluations.get("accuracy");
		const at = (step) => (this.board.axis === "step" ? step : x[steps.findIndex((one) => one >= step)]);
		return [
			...x.flatMap((where, row) => (row && versions[row] !== versions[row - 1]
				? [{ x: where, kind: "swap", text: `weight swap to version ${versions[row]}` }] : [])),
			...this.board.along(evaluations).map((where, row) =>
				({ x: where, kind: "evaluation", text: `evaluation ${percent(accuracy[row])}` })),
			...metrics.marks.map((mark) => ({ ...mark, x: at(mark.step), text: `${mark.kind} ${mark.name}` })),
		];
	}

	build() {
		for (const chart of this.run.about.charts) {
			const [id, title] = [chart.section.toLowerCase(), chart.section];
			if (!chart.lead && !this.sections.querySelector(`[data-section="${id}"]`)) {
				this.sections.append(h("section.charts", { "data-section": id }, h("h2", title), h("div.grid")));
			}
			this.add(chart, chart.lead ? this.leads : this.sections.querySelector(`[data-section="${id}"] .grid`));
		}
		this.draw();
	}

	/** @param {CatalogueChart} chart @param {Element} host */
	add(chart, host) {
		const table = this.run.tables[chart.table ?? "metrics"];
		const data = () => ({ x: this.board.along(table), series: lines(chart.series, table) });
		host.append(this.board.add({ ...chart, hide: true, data }));
	}

	draw() {
		const { metrics, evaluations } = this.run.tables;
		this.header();
		this.board.refresh();
		this.board.explain(metrics, evaluations);
		this.others();
		const without = this.board.charts.filter(({ series }) => !series.length).map(({ definition }) => definition);
		const isAlways = ({ series = {} }) => Object.values(series).every((column) => !column.includes("*"));
		const empty = without.filter(isAlways).map(({ title }) => title);
		this.none.textContent = empty.length ? `No values${this.run.live ? " yet" : ""}: ${empty.join(", ")}` : "";
	}

	// Charts of the columns that no chart of the catalogue shows.
	others() {
		const { run: { about, tables: { metrics } }, board, drawn, more, filter } = this;
		const known = about.charts.filter(({ table }) => !table).flatMap(({ series }) => Object.values(series));
		const columns = Object.fromEntries([...known, ...about.hidden_columns].map((column) => [column, column]));
		const shown = new Set(lines(columns, metrics).map(({ column }) => column));
		const isOther = (name) => !shown.has(name) && last(metrics.get(name)) !== undefined;
		const found = Object.keys(metrics.columns).filter(isOther);
		const wanted = new Set(more.open ? found.sort().filter((name) => name.includes(filter.value.trim())) : []);
		this.heading.textContent = `Other metrics (${found.length})`;
		more.hidden = !found.length;
		for (const name of [...drawn.keys()].filter((one) => !wanted.has(one))) {
			board.remove(drawn.get(name));
			drawn.delete(name);
		}
		const added = [...wanted].filter((name) => !drawn.has(name));
		for (const name of added) {
			const format = name.includes("bytes") ? "bytes" : /^time\/|seconds$/.test(name) ? "seconds" : "number";
			const description = about.descriptions[name] ?? about.descriptions[name.split("/")[0]];
			const series = { [name.split("/").at(-1)]: name };
			this.add({ id: name, title: name, section: "", format, description, series }, this.rest);
			drawn.set(name, this.rest.lastChild);
		}
		if (added.length) board.refresh();
	}

	header() {
		const { findings, ended_findings: ended, planned_steps: planned, step, live } = this.run.state;
		const names = findings.map(({ name }) => name);
		const early = (this.run.about.preflight?.findings ?? []).filter(({ name }) => !names.includes(name));
		const steps = (/** @type {Finding} */ { first, last: end }) =>
			(first === end ? `at step ${number(end)}` : `from step ${number(first)} to ${number(end)}`);
		update(this.head, h("div.toolbar.title", h("h1", this.run.name), h("p.state", stateText(this.run.state))),
			planned && (live || step < planned) && h("progress", { max: planned, value: step, "aria-label": "Steps" }),
			findings.map((found) => finding(found)), early.map((found) => finding(found, "at the start")),
			ended.length > 0 && h("details", { id: "ended" },
				h("summary", `Findings that have ended: ${ended.map(({ name }) => name).join(", ")}`),
				ended.map((found) => finding(found, steps(found)))), this.tiles());
		update(this.where, this.groups());
	}

	tiles() {
		const { state: { outcomes, live }, tables: { metrics, evaluations } } = this.run;
		const latest = (name, table = metrics) => last(table.get(name));
		const tile = (label, value, ...detail) =>
			h("div.card", h("dt", label), h("dd", value), detail.filter(Boolean).map((text) => h("dd", text)));
		const [low, high, problems, ungraded] = ["accuracy/low", "accuracy/high", "problems", "ungraded"].map((name) =>
			latest(name, evaluations));
		const first = evaluations.length > 1 ? `, first ${percent(evaluations.get("accuracy")[0])}` : "";
		const [ended, trained, speed] = [total(outcomes), outcomes.trained ?? 0, live ? 10 : Infinity];
		return h("dl.tiles",
			tile("Reward", number(latest("reward/mean")), `± ${number(latest("reward/std"))}`),
			tile("Held-out accuracy", percent(latest("accuracy", evaluations)), low && `${percent(low)} to ${percent(high)}`,
				`${number(problems)} problems${first}`, ungraded > 0 && `${number(ungraded)} problems ungraded`),
			tile("Tokens per second", number(this.speed(speed)), `mean of the ${live ? `last ${speed} steps` : "run"}`),
			tile("Groups trained on", ended ? percent(trained / ended) : MISSING, `${number(trained)} of ${number(ended)}`),
			tile("Truncated", percent(latest("truncated_fraction")),
				`mean length ${number(latest("completion_length/mean"))}`),
			tile("Peak memory", bytes(latest("peak_memory_bytes")), "MLX arrays"));
	}

	// Where every group is: the stages of groups in progress, and the outcomes of the others.
	groups() {
		const { outcomes, in_flight: stages } = this.run.state;
		const [most, all] = [Math.max(...Object.values(outcomes)), total(outcomes)];
		const rank = ([name, count]) => (name === "trained" ? Infinity : count);
		const rows = Object.entries(outcomes).sort((a, b) => rank(b) - rank(a));
		const row = ([name, count]) => h("tr", null,
			rowHead(h("a", { href: this.link(`#/groups?outcome=${name}`) }, name.replaceAll("_", " "))),
			h("td.num", number(count)), h("td.num", percent(count / all)),
			h("td", { class: `bar ${name}` }, h("span", { style: { width: `${(100 * count) / most}%` } })),
			h("td.why", this.run.about.descriptions[`outcomes/${name}`]));
		return [h("h3", "Where every group is"),
			stages && h("ol.flow", STAGES.map(([name, text]) => h("li", h("b", number(stages[name])), ` ${text}`))),
			all ? h("table", rows.map(row)) : h("p.muted", "No group has ended yet.")];
	}

	/** Tokens per second of the last steps. @param {number} steps */
	speed(steps) {
		const columns = ["completion_length/total", "tokens_per_second", "lines", "time/run"];
		const [tokens, rates, counts, ages] = columns.map((name) => this.run.tables.metrics.get(name).slice(-steps));
		const seconds = rates.map((rate, row) =>
			(counts[row] > 1 ? ages[row] - (ages[row - 1] ?? 0) : rate > 0 ? tokens[row] / rate : 0));
		return sum(tokens.map((count, row) => count * (counts[row] ?? 1))) / sum(seconds);
	}

	update(run, changed) {
		if (run !== this.run || !this.leads.firstChild) return;
		if (changed.some((kind) => kind === "metrics" || kind === "evaluations")) this.changed();
		else this.header();
	}

	close() {
		this.changed.cancel();
		this.board.close();
	}
}

const KINDS = /** @type {("metrics" | "evaluations")[]} */ (["metrics", "evaluations"]);

/** @param {number[]} values */
const sum = (values) => values.reduce((so_far, value) => so_far + value, 0);
/** @param {Record<string, number>} outcomes */
const total = (outcomes) => sum(Object.values(outcomes));

/** @param {State} state */
function stateText({ live, step, planned_steps: planned, seconds, policy_version: version, ...now }) {
	const at = `step ${number(step)} of ${number(planned)}, policy version ${number(version)}`;
	if (!live) return `${step < planned ? "Ended" : "Finished"} after ${duration(seconds)} at ${at}`;
	const left = missing(now.seconds_left) ? "time left unknown" : `about ${duration(now.seconds_left)} left`;
	const activity = now.waiting_for ? `waits for ${now.waiting_for}` : "computes an update";
	return `Live: ${at} · ${duration(seconds)} so far, ${left} · ${activity}`;
}

/** @param {Finding} found @param {string} [when] */
export function finding({ name, severity, fact, consequence, advice, remedy, command, example }, when) {
	return h("article.card.finding", { "data-severity": severity, "data-key": name },
		h("p", h("b.severity", severity === "error" ? "Error" : "Warning", when && ` ${when}`, ": "), h("b", fact), " ",
			h("span.chip", name)),
		h("p", consequence), h("p", h("b", "Do: "), advice),
		command && h("p", h("b", remedy?.action === "check" ? "Then check: " : "Run: "), copied(command)),
		example && h("details", h("summary", "Example"), h("pre", example)));
}
