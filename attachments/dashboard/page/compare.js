// The comparison of runs: charts with one line per run, the settings that differ, and means with differences.
import { Board, CHART_HELP } from "./board.js";
import { last, lines, writer } from "./chart.js";
import { fill, filterField, h, later, problem, rowHead } from "./element.js";
import { missing, MISSING } from "./format.js";
import { flat } from "./settings.js";

const PLACES = /^run_dir$|^server\.|(^|\.)port$/; // settings that say where a run is, and not what it does
const FIRST = 6; // runs that are shown at first

/** @typedef {CatalogueChart & {column: string}} Metric A chart of one column. */

export class Compare {
	help = CHART_HELP;
	board = new Board("step");
	leads = h("div.grid.leads");
	grid = h("div.grid");
	values = h("div.card.table-wrap", { tabindex: "0", role: "region", "aria-label": "Means" });
	settings = h("details.card");
	filter = filterField("metrics", () => this.draw());
	keys = { ...this.board.keys, "/": () => this.filter.focus() };
	refresh = later(1000, () => this.board.refresh());

	/** @param {HTMLElement} container @param {Place} _place @param {Context} context */
	constructor(container, _place, { runs }) {
		this.runs = runs;
		this.followed = new Set(runs.slice(0, FIRST));
		this.board.zoomed = () => {
			for (const run of this.shown()) this.board.sharpen(run, "metrics");
		};
		const boxes = runs.map((run) => {
			const box = h("input", { type: "checkbox", checked: this.followed.has(run), onchange: () => {
				this.followed[box.checked ? "add" : "delete"](run);
				this.load();
			} });
			return h("label", box, run.name);
		});
		const one = runs.length < 2 && h("p.muted", "One run is open. Several: clotho view RUN RUN …");
		fill(container, h("h1", "Compare"), one,
			this.board.toolbar({ marks: false }, boxes, this.filter), this.leads, this.grid, this.board.quiet, this.settings,
			this.values);
		this.load();
	}

	load() {
		const loading = [...this.followed].flatMap((run) => [run.describe(), run.load("metrics", "evaluations")]);
		Promise.all(loading).then(() => this.draw(), (error) => fill(this.grid, problem(error.message)));
	}

	// The chosen runs that have been loaded, in the order of the command line.
	shown() {
		return this.runs.filter((run) => this.followed.has(run) && run.about && run.loaded.has("metrics"));
	}

	/** The lines of all runs on one axis, with null where a run has no value. @param {Metric} metric */
	data({ table = "metrics", column }) {
		const found = this.shown().map((run) =>
			({ x: this.board.along(run.tables[table]), values: run.tables[table].get(column), label: run.name }));
		const x = [...new Set(found.flatMap((run) => run.x))].filter((at) => !missing(at)).sort((a, b) => a - b);
		const series = found.map((run) => {
			const at = new Map(run.x.map((value, row) => [value, run.values[row]]));
			return { label: run.label, values: x.map((value) => at.get(value) ?? null) };
		});
		return { x, series };
	}

	/** A chart for each column of a chart of the catalogue that a run has and that the filter names.
	 * @param {CatalogueChart} chart @returns {Metric[]} */
	metrics(chart) {
		const columns = Object.create(null);
		for (const { tables } of this.shown()) {
			for (const [name, values] of Object.entries(tables[chart.table ?? "metrics"].columns)) {
				if (!(name in columns) || last(values) !== undefined) columns[name] = values;
			}
		}
		const [first, ...others] = Object.values(chart.series);
		const wanted = this.filter.value.trim().toLowerCase();
		return lines(chart.series, { columns, get: () => [] }).map(({ column, label }) => {
			const isMain = first === column && (others.length === 0 || chart.lead);
			const title = isMain ? chart.title : `${chart.title}: ${label}`;
			return { ...chart, column, id: column, lead: isMain && chart.lead, title };
		}).filter(({ column, title }) => `${column} ${title}`.toLowerCase().includes(wanted));
	}

	draw() {
		for (const { figure } of [...this.board.charts]) this.board.remove(figure);
		const runs = this.shown();
		if (!runs.length) return;
		const metrics = runs[0].about.charts.flatMap((chart) => this.metrics(chart));
		for (const metric of metrics) {
			const figure = this.board.add({ ...metric, span: true, hide: true, data: () => this.data(metric) });
			(metric.lead ? this.leads : this.grid).append(figure);
		}
		this.board.refresh();
		this.board.explain(...runs.map((run) => run.tables.metrics));
		fill(this.values, means(metrics, runs));
		const profiles = runs.map(({ about }) => new Map(flat(about.profile ?? {})));
		const differing = [...new Set(profiles.flatMap((profile) => [...profile.keys()]))].filter((key) =>
			!PLACES.test(key) && new Set(profiles.map((profile) => profile.get(key))).size > 1);
		fill(this.settings, h("summary", `Settings that differ (${differing.length})`), differing.length
			? h("div.table-wrap", h("table.mono", heads("key", "th", runs), differing.map((key) =>
				h("tr", rowHead(key), profiles.map((profile) => h("td", String(profile.get(key) ?? MISSING)))))))
			: h("p.muted", "None"));
	}

	update(run, changed) {
		if (changed.length && this.shown().includes(run)) this.refresh();
	}

	close() {
		this.refresh.cancel();
		this.board.close();
	}
}

/** @param {string} first @param {string} tag @param {Run[]} runs */
const heads = (first, tag, runs) => h("thead", h("tr", h("th", first), runs.map(({ name }) => h(tag, name))));

/** The mean of the last ten steps, because a step says little about a run; of evaluations, the last one.
 * @param {Metric} metric @param {Run} run */
function end({ table = "metrics", column }, run) {
	const known = run.tables[table].get(column).filter((value) => !missing(value)).slice(table === "metrics" ? -10 : -1);
	return known.reduce((sum, value) => sum + value, 0) / known.length;
}

/** @param {Metric[]} metrics @param {Run[]} runs */
function means(metrics, runs) {
	const cell = (metric, run) => {
		const [write, value, base] = [writer(metric.format), end(metric, run), end(metric, runs[0])];
		const change = missing(value) || missing(base) || value === base ? ""
			: ` (${value < base ? "−" : "+"}${write(Math.abs(value - base))})`;
		return h("td.num", write(value), h("small", change));
	};
	const known = metrics.filter((metric) => runs.some((run) => !missing(end(metric, run))));
	return [h("h3", "Means of the last 10 steps, or the last evaluation, with the difference to the first run"),
		h("table", heads("metric", "th.num", runs),
			known.map((metric) => h("tr", rowHead(metric.title), runs.map((run) => cell(metric, run)))))];
}
