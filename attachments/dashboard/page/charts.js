// Charts over a common horizontal axis, drawn by uPlot: synchronized cursors, zoom, smoothing, legends with values, marks.
import { fill, h } from "./element.js";
import { bytes, duration, missing, number, percent } from "./format.js";
import { exported, get } from "./source.js";

export const LANE = 0.9; // height of a lane whose distance to the next is 1
const FONT = "11px system-ui, sans-serif";
const COLOURS = 7; // --s1 to --s7; the lines after these are dashed
const POWERS = Array.from({ length: 60 }, (_, power) => 2 ** power); // distances on an axis of bytes
const COUNTS = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));
const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800];
const AXES = {
	step: { incrs: COUNTS, split: number, text: (x) => `step ${number(x)}` },
	time: { incrs: SECONDS, split: (x) => (x ? duration(x) : "0"), text: duration },
};
// How values are written: in legends, and at the splits of an axis with an increment.
const FORMATS = {
	number: [number, axisNumber],
	percent: [percent, (y, incr) => `${(100 * y).toFixed(decimals(100 * incr))} %`],
	bytes: [bytes, bytes],
	seconds: [duration, (y, incr) => (y && y < 60 ? `${y.toFixed(decimals(incr))} s` : y ? duration(y) : "0")],
};
export const writer = (format = "number") => FORMATS[format][0];
// Marks: glyph above the plot, colour.
const MARKS = { __proto__: null, evaluation: ["▾", "s3"], warning: ["◆", "warn"], error: ["◆", "bad"] };

const decimals = (incr) => [0, 1, 2, 3, 4, 5].find((digits) => Math.abs(incr * 10 ** digits - Math.round(incr * 10 ** digits)) < 1e-6) ?? 6;

function axisNumber(y, incr) {
	if (y && incr < 1e-4) return y.toExponential(Math.max(0, Math.floor(Math.log10(Math.abs(y)) + 1e-9) - Math.floor(Math.log10(incr) + 1e-9))).replace("e+", "e");
	return incr >= 1e6 ? `${y / 1e6} M` : incr >= 1e4 ? `${y / 1e3} k` : y ? y.toFixed(decimals(incr)) : "0";
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
export const last = (values) => values.findLast((value) => !missing(value));

// Exponential moving average without the bias of its start; missing values stay missing.
function smooth(values, factor) {
	let [sum, weight] = [0, 0];
	return values.map((value) => {
		if (missing(value)) return null;
		sum = factor * sum + (1 - factor) * value;
		weight = factor * weight + 1 - factor;
		return sum / weight;
	});
}

// The lines of a chart of the catalogue: a column with * stands for all columns that it matches.
export function lines(series, table) {
	const values = (name) => name && table.columns[name];
	return series.flatMap(({ label, column, spread, low, high, dash }) => {
		const [start, end] = column.split("*");
		const names = end === undefined ? [column] : Object.keys(table.columns).filter((name) => name.startsWith(start) && name.endsWith(end) && name.length > (start + end).length);
		return names.map((name) => {
			const star = name.slice(start.length, name.length - (end?.length ?? 0));
			const width = values(spread?.replace("*", star));
			const edge = (sign) => width && values(name)?.map((value, row) => (missing(value) || missing(width[row]) ? null : value + sign * width[row]));
			return { column: name, label: label.replace("*", star), dash, values: table.get(name), low: values(low?.replace("*", star)) ?? edge(-1) ?? table.minima?.[name], high: values(high?.replace("*", star)) ?? edge(1) ?? table.maxima?.[name] };
		});
	});
}

export const CHART_HELP = [["j / k", "next / previous chart"], ["← →", "value before / after, in a chart"], ["+ − 0", "zoom in, out, to the whole run"], ["Enter", "enlarge the chart"], ["drag", "zoom; a double click shows the whole run"]];

// A board of charts. axis: "step" or "time". marks(axis) returns [{x, kind, severity, text}].
export class Board {
	constructor(axis, marks = () => []) {
		Object.assign(this, { axis, marks, smoothing: 0, marked: true, range: null, charts: [], sync: `${Math.random()}` });
		this.readout = h("span.readout");
		this.reset = h("button.button", { hidden: true, onclick: () => this.zoom() }, "Reset zoom");
		this.live = h("span.sr", { "aria-live": "polite" });
		this.note = h("p.muted.thinned");
		this.asked = new Map();
		this.folds = true;
		this.quiet = h("p.muted.quiet");
		this.dark = matchMedia("(prefers-color-scheme: dark)");
		this.dark.onchange = () => this.charts.forEach((chart) => chart.build());
		this.keys = { j: () => this.move(1), k: () => this.move(-1) };
	}

	toolbar({ axis = true, smoothing = true, marks = true }, ...more) {
		const choose = (label, options, set) => h("label", label, h("select", {
			onchange: ({ target }) => { set(target.value); this.range = null; this.refresh(); },
		}, options.map((text) => h("option", text))));
		return h("div.toolbar", axis && choose("Axis", ["step", "time"], (name) => { this.axis = name; }),
			smoothing && choose("Smoothing", ["0", "0.5", "0.8", "0.9", "0.95"], (value) => { this.smoothing = Number(value); }),
			marks && h("label", h("input", { type: "checkbox", checked: true, onchange: ({ target }) => { this.marked = target.checked; this.refresh(); } }), "Marks",
				h("span.mark", "| weight swap"), axis && [h("span.mark.eval", "evaluation"), h("span.mark.find", "finding")]),
			more, this.reset, this.readout, this.live, this.note);
	}

	add(definition) {
		const chart = new Chart(this, definition);
		this.charts.push(chart);
		return chart.figure;
	}

	remove(figure) {
		const at = this.charts.findIndex((chart) => chart.figure === figure);
		this.charts.splice(at, 1)[0].close();
		figure.remove();
	}

	refresh() {
		this.found = this.marks(this.axis).filter((mark) => !missing(mark.x));
		this.charts.forEach((chart) => chart.collect());
		const ends = this.charts.flatMap(({ x }) => (x.length ? [x[0], x.at(-1)] : []));
		const low = ends.length ? Math.min(...ends) : 0;
		this.extent = [low, Math.max(low + 1, ...ends)];
		this.charts.forEach((chart) => chart.draw());
		this.zoom(this.range);
		const quiet = this.charts.filter((chart) => chart.isQuiet).map(({ definition: { title, format, neutral = 0 } }) => `${title} ${writer(format)(neutral)}`);
		const turn = () => { this.folds = !this.folds; this.refresh(); };
		fill(this.quiet, quiet.length > 0 && [`Quiet: ${quiet.join(" · ")} `, h("button.button.small", { onclick: turn }, this.folds ? "Show" : "Hide")]);
	}

	zoom(range) {
		const [low, high] = this.extent;
		this.range = range && (range[0] > low || range[1] < high) ? [Math.max(low, range[0]), Math.min(high, range[1])] : null;
		this.reset.hidden = !this.range;
		this.charts.forEach((chart) => chart.plot?.setData(chart.rows()));
		this.zoomed?.();
	}

	// The lines of the zoomed range take the place of its merged rows. along(table): the values of the horizontal axis.
	async sharpen(table, path, along) {
		if (exported || !this.range || !table.length) return;
		const [x, axis, [low, high]] = [along(table), table.get(table.key[0]), this.range];
		const first = Math.max(0, x.findIndex((at) => at >= low));
		const end = x.findIndex((at) => at >= high);
		const stop = end < 0 ? x.length - 1 : end;
		const address = `${path}?from=${axis[first]}&to=${axis[stop]}`;
		if (this.asked.get(path) === address || table.thinning(first, stop + 1) === 1) return;
		this.asked.set(path, address);
		try {
			table.replace(await get(address));
			this.refresh();
		} catch (error) {
			this.readout.textContent = error.message;
		}
	}

	// Say what the charts do not show. lost: number of the oldest marks that the server has dropped.
	explain(tables, lost = 0) {
		const lines = Math.max(...tables.map((table) => table.thinning()));
		fill(this.note, lines > 1 && `A point stands for up to ${number(lines)} lines: it is their mean, and the band reaches from the least to the largest value. ${exported ? "The run has every line: clotho view RUN. " : "A zoom shows every line. "}`,
			lost > 0 && `The first ${number(lost)} marks are not shown.`);
	}

	hover(x) {
		const near = this.axis === "step" ? 0.5 : (this.extent[1] - this.extent[0]) / 200;
		const texts = this.found.filter((mark) => Math.abs(mark.x - x) < near).map((mark) => mark.text);
		this.readout.textContent = missing(x) ? "" : [AXES[this.axis].text(x), ...new Set(texts)].join(" · ");
	}

	move(by) {
		const figures = this.charts.map(({ figure }) => figure).filter((figure) => !figure.hidden);
		const at = figures.findIndex((figure) => figure.contains(document.activeElement));
		figures[Math.max(0, Math.min(figures.length - 1, at + by))]?.focus();
	}

	close() {
		this.dark.onchange = null;
		this.charts.forEach((chart) => chart.close());
	}
}

// definition: {id, title, description, format, range, lanes, span, empty, hide, lead, neutral, data() -> {x, series: [{label, values, low, high, dash, base}]}}.
// hide: without values, and with no value but `neutral`. lead: the chart is large. low, high: a band. base: areas above it, constant between two points. span: lines connect points over missing values.
class Chart {
	constructor(board, definition) {
		Object.assign(this, { board, definition, x: [], series: [], hidden: new Set() });
		const { id, title, description, lead } = definition;
		this.host = h("div.plot");
		this.legend = h("ul.legend");
		this.figure = h("figure", { class: `card chart${lead ? " lead" : ""}`, tabindex: "0", "data-chart": id, "aria-label": title, onkeydown: (event) => this.key(event) },
			h("figcaption", h("h3", title),
				description && [h("button.info", { "aria-label": `About ${title}` }, "i"), h("span.tip", { role: "tooltip" }, description)],
				h("button.info.enlarge", { "aria-label": `Enlarge ${title}`, title: "Enlarge (Enter)", onclick: () => this.enlarge() }, "⤢")),
			this.host, this.legend);
		this.observer = new ResizeObserver(() => this.resize());
		this.observer.observe(this.host);
	}

	get size() {
		return { width: Math.max(120, this.host.clientWidth), height: this.figure.classList.contains("wide") ? 360 : this.definition.lead ? 240 : 150 };
	}

	collect() {
		const { x, series } = this.definition.data();
		this.series = series.filter((line) => last(line.values) !== undefined).map((line, at) => ({ ...line, dash: line.dash || at >= COLOURS }));
		this.x = this.series.length ? x : [];
		const { hide, lead, neutral = 0 } = this.definition;
		this.isQuiet = hide && !lead && this.series.length > 0 && this.series.every(({ values }) => values.every((value) => missing(value) || value === neutral));
	}

	draw() {
		this.figure.hidden = Boolean(this.definition.hide && (!this.series.length || (this.isQuiet && this.board.folds)));
		if (this.figure.hidden) return;
		const form = JSON.stringify([this.series.map(({ label, high }) => [label, !high]), this.board.smoothing, this.board.axis]);
		if (form !== this.form) this.build();
		this.form = form;
		this.write(this.plot?.cursor.idx);
	}

	// Per series: the line, the measured values if the line is smoothed, and both edges of the band.
	rows() {
		const factor = this.definition.table === "evaluations" ? 0 : this.board.smoothing;
		const drawn = (values) => (values && factor ? smooth(values, factor) : values);
		const rows = this.series.flatMap(({ values, low, high }) => [drawn(values), factor ? values : null, drawn(high), drawn(low)]);
		return [this.x, ...rows.map((row) => row ?? this.x.map(() => null))];
	}

	build() {
		this.plot?.destroy();
		this.plot = null;
		this.entries = this.series.map(({ label, dash }, at) => {
			const value = h("b");
			const button = h("button", { "aria-pressed": `${!this.hidden.has(label)}`, title: "Show or hide", onclick: () => this.toggle(at) },
				h("i", { class: dash && "dash", style: { "--c": `var(--s${(at % COLOURS) + 1})` } }), h("span", label), value);
			return { button, value };
		});
		fill(this.legend, this.entries.map(({ button }) => h("li", button)));
		fill(this.host, this.series.length ? null : h("p.empty", this.definition.empty ?? "No values yet"));
		if (this.series.length) this.plot = new uPlot(this.options(), this.rows(), this.host);
		this.write();
	}

	options() {
		const { board, definition } = this;
		const [, split] = FORMATS[definition.format ?? "number"];
		const { lanes, span } = definition;
		const bands = [];
		const series = this.series.flatMap(({ label, base, dash, high }, at) => {
			const show = !this.hidden.has(label);
			const stroke = colour(`s${(at % COLOURS) + 1}`);
			const none = { show, stroke: null, points: { show: false } };
			const area = base === undefined ? { spanGaps: span, points: { size: 5, filter: span ? undefined : isolated } } : { points: { show: false }, paths: uPlot.paths.stepped({ align: -1 }), fill: `${stroke}66`, fillTo: base };
			if (high) bands.push({ series: [4 * at + 3, 4 * at + 4], fill: stroke + (this.series.length > 1 ? "14" : "26") });
			return [{ show, stroke, width: 1.6, dash: dash && [5, 4], ...area }, { ...none, stroke: `${stroke}55` }, none, none];
		});
		const axis = { stroke: colour("muted"), font: FONT, ticks: { show: false }, grid: { stroke: colour("grid"), width: 1 } };
		const vertical = lanes ? { splits: lanes.map((_, at) => at + LANE / 2), values: () => lanes, grid: { show: false } }
			: { space: 28, ...(definition.format === "bytes" && { incrs: POWERS }), values: (_, splits, __, ___, incr) => splits.map((y) => split(y, incr)) };
		return {
			...this.size, legend: { show: false }, padding: [12, 22, 0, 0], bands, series: [{}, ...series],
			scales: { x: { time: false, range: () => board.range ?? board.extent }, y: { range: (_, low, high) => bounds(definition, low, high) } },
			axes: [{ ...axis, size: 22, gap: 3, space: 64, incrs: AXES[board.axis].incrs, values: (_, splits) => splits.map((x) => AXES[board.axis].split(x)) },
				{ ...axis, gap: 4, size: (_, texts) => 14 + 6.2 * Math.max(1, ...(texts ?? []).map((text) => text.length)), ...vertical }],
			cursor: {
				y: false, points: { size: 6 }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => board.zoom() },
				sync: { key: board.sync, setSeries: false, filters: { pub: (type) => /move|leave/.test(type) } },
			},
			hooks: { draw: [() => this.marks()], setCursor: [() => this.moved()], setSelect: [() => this.selected()] },
		};
	}

	moved() {
		const { idx, left, event } = this.plot?.cursor ?? {};
		const at = left >= 0 ? idx : undefined;
		this.write(at);
		if (event || at === undefined) this.board.hover(this.x[at]);
	}

	selected() {
		const { left, width } = this.plot.select;
		if (width < 6) return;
		this.plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
		this.board.zoom([left, left + width].map((at) => this.plot.posToVal(at, "x")));
	}

	// The values of a row, or the latest values, in the legend.
	write(row) {
		this.series.forEach(({ values, base }, at) => {
			const value = missing(row) ? last(values) : this.definition.span ? last(values.slice(0, row + 1)) : values[row];
			this.entries[at].value.textContent = writer(this.definition.format)(base === undefined || missing(value) ? value : (value - base) / LANE);
		});
	}

	toggle(at) {
		const { label } = this.series[at];
		const show = this.hidden.delete(label);
		if (!show) this.hidden.add(label);
		[1, 2, 3, 4].forEach((row) => this.plot.setSeries(4 * at + row, { show }));
		this.entries[at].button.setAttribute("aria-pressed", `${show}`);
	}

	marks() {
		const { plot, board, definition } = this;
		if (!plot || !board.marked) return;
		const { ctx, bbox: { top, height }, scales: { x: { min, max } } } = plot;
		const ratio = devicePixelRatio;
		const seen = board.found.filter(({ x }) => x >= min && x <= max);
		const crowded = seen.length > plot.width / 3;
		const drawn = new Set();
		ctx.save();
		ctx.textAlign = "center";
		ctx.font = `${11 * ratio}px sans-serif`;
		for (const { x, kind, severity } of seen) {
			if (kind === "swap" && crowded) continue;
			const [glyph, name] = MARKS[kind] ?? MARKS[severity] ?? (kind === "swap" ? ["", "muted"] : MARKS.error);
			const at = Math.round(plot.valToPos(x, "x", true));
			if (drawn.has(`${at} ${glyph} ${name}`)) continue;
			drawn.add(`${at} ${glyph} ${name}`);
			ctx.strokeStyle = ctx.fillStyle = colour(name);
			ctx.globalAlpha = glyph ? 1 : 0.6;
			ctx.fillText(glyph, at, top - 2 * ratio);
			if (kind === "evaluation") continue;
			ctx.setLineDash(glyph ? [3 * ratio, 3 * ratio] : []);
			ctx.beginPath();
			ctx.moveTo(at, glyph || definition.lanes ? top : top + height - 5 * ratio);
			ctx.lineTo(at, top + height);
			ctx.stroke();
		}
		ctx.restore();
	}

	key(event) {
		const { key, target } = event;
		const keys = ["ArrowLeft", "ArrowRight", "Home", "End", "+", "-", "0", "Enter"];
		if (event.ctrlKey || event.metaKey || event.altKey || target !== this.figure || !this.plot || !keys.includes(key)) return;
		event.preventDefault();
		event.stopPropagation();
		const [low, high] = this.board.range ?? this.board.extent;
		const rows = [...this.x.keys()].filter((row) => this.x[row] >= low && this.x[row] <= high);
		const at = Math.max(0, rows.indexOf(this.row ?? rows.at(-1)));
		const to = [at - 1, at + 1, 0, rows.length - 1][keys.indexOf(key)];
		if (to !== undefined) this.point(rows[Math.max(0, Math.min(rows.length - 1, to))]);
		else if (key === "Enter") this.enlarge();
		else if (key === "0") this.board.zoom();
		else {
			const middle = this.x[rows[at]] ?? (low + high) / 2;
			this.board.zoom([low, high].map((end) => middle + (end - middle) * (key === "+" ? 0.5 : 2)));
		}
	}

	point(row) {
		const { board, plot, x } = this;
		if (row === undefined) return;
		this.row = row;
		plot.setCursor({ left: plot.valToPos(x[row], "x"), top: 9 }, true, true);
		board.hover(x[row]);
		board.live.textContent = `${board.readout.textContent}: ${this.series.map(({ label }, at) => `${label} ${this.entries[at].value.textContent}`).join(", ")}`;
	}

	enlarge() {
		this.figure.classList.toggle("wide");
		this.resize();
		this.figure.scrollIntoView({ block: "nearest" });
	}

	resize() {
		const { size, plot } = this;
		if (plot && this.host.clientWidth && (size.width !== plot.width || size.height !== plot.height)) plot.setSize(size);
	}

	close() {
		this.observer.disconnect();
		this.plot?.destroy();
	}
}

// Bounds of the vertical axis: 0 is included unless all values are far from it.
function bounds({ range, format }, low, high) {
	if (range || missing(low)) return range ?? [0, 1];
	const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || (format === "percent" ? 0.05 : 1);
	const top = high + pad;
	return [low >= 0 && (low <= 0.7 * high || low === high) ? 0 : low - pad, format === "percent" && high <= 1 ? Math.min(1.02, top) : top];
}

// Rows of points that no line shows, because both neighbours are missing.
function isolated(plot, index, show) {
	const values = plot.data[index];
	return show ? null : [...values.keys()].filter((row) => !missing(values[row]) && missing(values[row - 1]) && missing(values[row + 1]));
}
