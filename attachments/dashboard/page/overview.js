// The overview: state of the run, findings, where every group is, and the charts of all metrics.
import { Board, CHART_HELP, last, lines } from "./charts.js";
import { command as copied, fill, filterField, h, later, problem, rowHead } from "./element.js";
import { bytes, duration, missing, MISSING, number, percent } from "./format.js";

export function show(container, parameters, { runId, overview, link, source: { get, Columns } }) {
	const tables = { metrics: new Columns("step"), evaluations: new Columns("step", "final") };
	const { metrics, evaluations } = tables;
	const marks = [];
	const head = h("div");
	const leads = h("div.grid.leads");
	const where = h("section.card.where");
	const sections = h("div");
	const filter = filterField("other metrics", others);
	const heading = h("h2");
	const rest = h("div.grid");
	const more = h("details", { ontoggle: others }, h("summary", heading), filter, rest);
	const board = new Board("step", marksOn);
	const drawn = new Map();
	const none = h("p.muted");
	let descriptions = new Map();
	let lost = 0;

	const along = (table) => table.get(board.axis === "step" ? "step" : "time/run");

	function marksOn() {
		const [steps, versions, accuracy] = [metrics.get("step"), metrics.get("policy_version"), evaluations.get("accuracy")];
		const x = along(metrics);
		const at = (step) => (board.axis === "step" ? step : x[steps.findIndex((one) => one >= step)]);
		return [
			...x.flatMap((where, row) => (row && versions[row] !== versions[row - 1] ? [{ x: where, kind: "swap", text: `weight swap to version ${versions[row]}` }] : [])),
			...along(evaluations).map((where, row) => ({ x: where, kind: "evaluation", text: `evaluation ${percent(accuracy[row])}` })),
			...marks.map((mark) => ({ ...mark, x: at(mark.step), text: `${mark.kind} ${mark.name}` })),
		];
	}

	board.zoomed = () => Object.entries(tables).forEach(([kind, table]) => board.sharpen(table, `runs/${runId}/${kind}`, along));

	function add(chart, host) {
		const table = tables[chart.table ?? "metrics"];
		host.append(board.add({ ...chart, hide: true, data: () => ({ x: along(table), series: lines(chart.series, table) }) }));
	}

	function build() {
		const [large, others] = [true, false].map((lead) => overview.charts.filter((chart) => Boolean(chart.lead) === lead));
		large.forEach((chart) => add(chart, leads));
		for (const section of new Set(others.map((chart) => chart.section))) {
			const grid = h("div.grid");
			sections.append(h("section.charts", h("h2", section), grid));
			others.filter((chart) => chart.section === section).forEach((chart) => add(chart, grid));
		}
	}

	// Charts of the columns that no chart of the catalogue shows.
	function others() {
		const known = [...overview.hidden_columns.map((column) => ({ column, label: "" })), ...overview.charts.flatMap((chart) => (chart.table ? [] : chart.series))];
		const shown = new Set(lines(known, metrics).map(({ column }) => column));
		const found = Object.keys(metrics.columns).filter((name) => !shown.has(name) && last(metrics.get(name)) !== undefined).sort();
		const wanted = new Set(more.open ? found.filter((name) => name.includes(filter.value.trim())) : []);
		heading.textContent = `Other metrics (${found.length})`;
		more.hidden = !found.length;
		for (const [name, figure] of drawn) {
			if (wanted.has(name)) continue;
			board.remove(figure);
			drawn.delete(name);
		}
		const before = drawn.size;
		for (const name of wanted) {
			if (drawn.has(name)) continue;
			const format = name.includes("bytes") ? "bytes" : /^time\/|seconds$/.test(name) ? "seconds" : "number";
			add({ id: name, title: name, format, description: descriptions.get(name) ?? descriptions.get(name.split("/")[0]), series: [{ label: name.split("/").at(-1), column: name }] }, rest);
			drawn.set(name, rest.lastChild);
		}
		if (drawn.size > before) board.refresh();
	}

	function header() {
		const open = [...head.querySelectorAll("[open]")].map(({ id }) => id);
		const { findings = [], ended_findings: ended = [], preflight, planned_steps: planned, step, live } = overview;
		const names = findings.map(({ name }) => name);
		const early = (preflight?.findings ?? []).filter(({ name }) => !names.includes(name));
		const steps = ({ first, last: end }) => (first === end ? `at step ${number(end)}` : `from step ${number(first)} to ${number(end)}`);
		fill(head, h("div.toolbar.title", h("h1", overview.name), h("p.state", stateText(overview))),
			planned && (live || step < planned) && h("progress", { max: planned, value: step ?? 0, "aria-label": "Steps" }),
			findings.map((found) => finding(found, "", open)), early.map((found) => finding(found, "at the start", open)), ended.length > 0 && h("details", { id: "ended", open: open.includes("ended") },
				h("summary", `Findings that have ended: ${ended.map(({ name }) => name).join(", ")}`), ended.map((found) => finding(found, steps(found), open))), tiles());
		fill(where, groups());
	}

	function tiles() {
		const latest = (name, table = metrics) => last(table.get(name));
		const tile = (label, value, ...detail) => h("div.card", h("dt", label), h("dd", value), detail.map((text) => h("dd", text)));
		const [low, high] = ["low", "high"].map((end) => latest(`accuracy_interval/${end}`, evaluations));
		const { outcomes } = overview;
		const ended = total(outcomes);
		const speed = overview.live ? 10 : Infinity;
		return h("dl.tiles",
			tile("Reward", number(latest("reward/mean")), `± ${number(latest("reward/std"))}`),
			tile("Held-out accuracy", percent(latest("accuracy", evaluations)), low && `${percent(low)} to ${percent(high)}`, `${number(latest("problems", evaluations))} problems${evaluations.length > 1 ? `, first ${percent(evaluations.get("accuracy")[0])}` : ""}`, latest("ungraded", evaluations) > 0 && `${number(latest("ungraded", evaluations))} problems ungraded`),
			tile("Tokens per second", number(mean(speed)), overview.live ? `mean of the last ${speed} steps` : "mean of the run"),
			tile("Groups trained on", ended ? percent((outcomes.trained ?? 0) / ended) : MISSING, `${number(outcomes.trained ?? 0)} of ${number(ended)}`),
			tile("Truncated", percent(latest("truncated_fraction")), `mean length ${number(latest("completion_length/mean"))}`),
			tile("Peak memory", bytes(latest("peak_memory_bytes")), "MLX arrays"));
	}

	// Where every group is: the stages of groups in progress, and the outcomes of the others.
	function groups() {
		const { outcomes, in_flight: stages } = overview;
		const most = Math.max(...Object.values(outcomes));
		const share = (count) => count / total(outcomes);
		return [h("h3", "Where every group is"),
			stages && h("ol.flow", ["queued", "decoding", "scoring", "waiting"].map((name) => h("li", h("b", number(stages[name])), name === "waiting" ? " waiting for the learner" : ` ${name}`))),
			total(outcomes) ? h("table", Object.entries(outcomes).sort((a, b) => (b[0] === "trained") - (a[0] === "trained") || b[1] - a[1]).map(([name, count]) => h("tr", null,
				rowHead(h("a", { href: link(`#/groups?outcome=${name}`) }, name.replaceAll("_", " "))),
				h("td.num", number(count)), h("td.num", percent(share(count))),
				h("td", { class: `bar ${name}` }, h("span", { style: { width: `${(100 * count) / most}%` } })), h("td.why", descriptions.get(`outcomes/${name}`)))))
				: h("p.muted", "No group has ended yet.")];
	}

	// Tokens per second of the last steps.
	function mean(steps) {
		const [tokens, rates, lines, ages] = ["completion_length/total", "tokens_per_second", "lines", "time/run"].map((name) => metrics.get(name).slice(-steps));
		const seconds = rates.map((rate, row) => (lines[row] > 1 ? ages[row] - (ages[row - 1] ?? 0) : rate > 0 ? tokens[row] / rate : 0));
		return sum(tokens.map((count, row) => count * (lines[row] ?? 1))) / sum(seconds);
	}

	const changed = later(250, () => {
		header();
		board.refresh();
		board.explain([metrics, evaluations], lost);
		others();
		const always = ({ definition, series }) => !series.length && definition.series.every(({ column }) => !column.includes("*"));
		const empty = board.charts.filter(always).map(({ definition }) => definition.title);
		none.textContent = empty.length ? `No values${overview.live ? " yet" : ""}: ${empty.join(", ")}` : "";
	});

	async function load() {
		const [found, lines, tests] = await Promise.all(["overview", "metrics", "evaluations"].map((name) => get(`runs/${runId}/${name}`)));
		overview = found;
		descriptions = new Map(Object.entries(found.descriptions));
		metrics.load(lines);
		evaluations.load(tests);
		marks.push(...lines.marks);
		lost = lines.lost_marks;
		build();
		changed();
	}

	fill(container, head, board.toolbar({}), leads, where, sections, board.quiet, none, more);
	load().catch((error) => fill(head, problem(error.message)));
	return {
		update(kind, data) {
			if (kind === "overview") overview = { ...overview, ...data };
			if (tables[kind]?.add(data)) marks.push(...data.marks);
			if (leads.firstChild) changed();
		},
		close() {
			changed.cancel();
			board.close();
		},
		keys: { ...board.keys, "/": () => { more.open = true; filter.focus(); } },
		help: CHART_HELP,
	};
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const total = (outcomes) => sum(Object.values(outcomes));

export function stateText({ live, step, planned_steps: planned, seconds, seconds_left: left, waiting_for: waiting, policy_version: version }) {
	const at = `step ${number(step)} of ${number(planned)}, policy version ${number(version)}`;
	if (!live) return `${step < planned ? "Ended" : "Finished"} after ${duration(seconds)} at ${at}`;
	return `Live: ${at} · ${duration(seconds)} so far, ${missing(left) ? "time left unknown" : `about ${duration(left)} left`} · ${waiting ? `waits for ${waiting}` : "computes an update"}`;
}

export function finding({ name, severity, fact, consequence, advice, remedy, command, example }, when, open = []) {
	return h("article.card.finding", { "data-severity": severity },
		h("p", h("b.severity", severity === "error" ? "Error" : "Warning", when && ` ${when}`, ": "), h("b", fact), " ", h("span.chip", name)),
		h("p", consequence), h("p", h("b", "Do: "), advice),
		command && h("p", h("b", remedy?.action === "check" ? "Then check: " : "Run: "), copied(command)),
		example && h("details", { id: `example-${name}`, open: open.includes(`example-${name}`) }, h("summary", "Example"), h("pre", example)));
}
