// The comparison of runs: charts with one line per run, the settings that differ, and means with differences.
import { Board, CHART_HELP, lines, writer } from "./charts.js";
import { fill, filterField, h, later, problem, rowHead } from "./element.js";
import { missing, MISSING } from "./format.js";
import { flat } from "./settings.js";

const PLACES = /^run_dir$|^server\.|(^|\.)port$/; // settings that say where a run is, and not what it does

export function show(container, parameters, { runs, source: { get, Columns } }) {
	const chosen = new Set(runs.map(({ id }) => id).slice(0, 6));
	const loaded = new Map();
	const board = new Board("step");
	const leads = h("div.grid.leads");
	const grid = h("div.grid");
	const values = h("div.card.table-wrap");
	const settings = h("details.card");
	const filter = filterField("metrics", draw);
	const boxes = runs.map(({ id, name }) => h("label", h("input", {
		type: "checkbox", checked: chosen.has(id), onchange: ({ target }) => { chosen[target.checked ? "add" : "delete"](id); load(); },
	}), name));
	const refresh = later(1000, () => board.refresh());

	const along = (table) => table.get(board.axis === "step" ? "step" : "time/run");
	board.zoomed = () => shown().forEach((run) => board.sharpen(run.metrics, `runs/${run.id}/metrics`, along));

	const shown = () => [...chosen].sort((a, b) => a - b).map((id) => loaded.get(id)).filter(Boolean);

	async function load() {
		await Promise.all([...chosen].filter((id) => !loaded.has(id)).map(async (id) => {
			const [overview, metrics, evaluations] = await Promise.all(["overview", "metrics", "evaluations"].map((name) => get(`runs/${id}/${name}`)));
			const run = { id, name: runs.find((one) => one.id === id).name, overview, metrics: new Columns("step"), evaluations: new Columns("step", "final") };
			run.metrics.load(metrics);
			run.evaluations.load(evaluations);
			loaded.set(id, run);
		}));
		draw();
	}

	// The lines of all runs on one axis, with null where a run has no value.
	function data(table, column) {
		const found = shown().map((run) => ({ x: along(run[table]), values: run[table].get(column), label: run.name }));
		const x = [...new Set(found.flatMap((run) => run.x))].filter((at) => !missing(at)).sort((a, b) => a - b);
		return {
			x,
			series: found.map((run) => {
				const at = new Map(run.x.map((value, row) => [value, run.values[row]]));
				return { label: run.label, values: x.map((value) => at.get(value) ?? null) };
			}),
		};
	}

	// The columns of all runs.
	const all = (table) => ({ columns: Object.assign(Object.create(null), ...shown().map((run) => run[table].columns)), get: () => [] });

	function draw() {
		const [first] = shown();
		board.charts.map(({ figure }) => figure).forEach((figure) => board.remove(figure));
		if (!first) return;
		const metrics = first.overview.charts.flatMap((chart) => lines(chart.series, all(chart.table ?? "metrics")).map(({ column, label }) => ({ ...chart, column, id: column, lead: chart.lead && chart.series[0].column === column, title: chart.series[0].column !== column || (chart.series.length > 1 && !chart.lead) ? `${chart.title}: ${label}` : chart.title, table: chart.table ?? "metrics" })))
			.filter(({ column, title }) => `${column} ${title}`.toLowerCase().includes(filter.value.trim().toLowerCase()));
		for (const chart of metrics) (chart.lead ? leads : grid).append(board.add({ ...chart, span: true, hide: true, data: () => data(chart.table, chart.column) }));
		board.refresh();
		board.explain(shown().map((run) => run.metrics));
		// A step says little about a run, so that the last ten are averaged.
		const ends = (chart, run) => {
			const known = run[chart.table].get(chart.column).filter((value) => !missing(value)).slice(chart.table === "metrics" ? -10 : -1);
			return known.reduce((sum, value) => sum + value, 0) / known.length;
		};
		const change = (write, value, base) => (missing(value) || missing(base) || value === base ? "" : ` (${value < base ? "−" : "+"}${write(Math.abs(value - base))})`);
		fill(values, h("h3", "Means of the last 10 steps, or the last evaluation, with the difference to the first run"), h("table", null,
			h("thead", h("tr", h("th", "metric"), shown().map(({ name }) => h("th.num", name)))),
			metrics.filter((chart) => shown().some((run) => !missing(ends(chart, run)))).map((chart) => {
				const write = writer(chart.format);
				return h("tr", rowHead(chart.title), shown().map((run) => h("td.num", write(ends(chart, run)), h("small", change(write, ends(chart, run), ends(chart, first))))));
			})));
		const profiles = shown().map(({ overview }) => new Map(flat(overview.profile ?? {})));
		const differing = [...new Set(profiles.flatMap((profile) => [...profile.keys()]))].filter((key) => !PLACES.test(key) && new Set(profiles.map((profile) => profile.get(key))).size > 1);
		fill(settings, h("summary", `Settings that differ (${differing.length})`), differing.length ? h("div.table-wrap", h("table.mono",
			h("thead", h("tr", h("th", "key"), shown().map(({ name }) => h("th", name)))),
			differing.map((key) => h("tr", rowHead(key), profiles.map((profile) => h("td", String(profile.get(key) ?? MISSING))))))) : h("p.muted", "None"));
	}

	fill(container, h("h1", "Compare"), runs.length < 2 && h("p.muted", "One run is open. Several: clotho view RUN RUN …"),
		board.toolbar({ marks: false }, boxes, filter), leads, grid, board.quiet, settings, values);
	load().catch((error) => fill(grid, problem(error.message)));
	return {
		update(kind, data) {
			const run = loaded.get(runs.find(({ live }) => live)?.id);
			if (run?.[kind] instanceof Columns && run[kind].add(data)) refresh();
		},
		close() {
			refresh.cancel();
			board.close();
		},
		keys: { ...board.keys, "/": () => filter.focus() },
		help: CHART_HELP,
	};
}
