// A chart of a board, drawn by uPlot: synchronized cursors, smoothing, bands, legends with values, marks.
import { fill, h } from "./element.js";
import { bytes, duration, missing, number, percent } from "./format.js";

export const LANE = 0.9; // height of a lane whose distance to the next is 1
const FONT = "11px system-ui, sans-serif";
const COLOURS = 7; // --s1 to --s7; the lines after these are dashed
const POWERS = Array.from({ length: 60 }, (_, power) => 2 ** power); // distances on an axis of bytes
const COUNTS = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));
const SECONDS = [
	0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800,
];
export const AXES = {
	step: { incrs: COUNTS, split: number, text: (x) => `step ${number(x)}` },
	time: { incrs: SECONDS, split: (x) => (x ? duration(x) : "0"), text: duration },
};
// How values are written: in legends, and at the splits of an axis with an increment.
const FORMATS = {
	number: [number, axisNumber],
	percent: [percent, (y, incr) => `${(100 * y).toFixed(decimals(100 * incr))} %`],
	bytes: [bytes, bytes],
	seconds: [duration, (y, incr) =>
		(y && y < 60 ? `${y.toFixed(decimals(incr))} s` : y ? duration(y) : "0")],
};
/** @param {keyof typeof FORMATS} [format] */
export const writer = (format = "number") => /** @type {(value: any) => string} */ (FORMATS[format][0]);
// Marks: glyph above the plot, colour.
const MARKS = { __proto__: null, evaluation: ["▾", "s3"], warning: ["◆", "warn"], error: ["◆", "bad"] };

/** @param {number} incr */
const decimals = (incr) => [0, 1, 2, 3, 4, 5].find((digits) => {
	const scaled = incr * 10 ** digits;
	return Math.abs(scaled - Math.round(scaled)) < 1e-6;
}) ?? 6;

/** @param {number} y @param {number} incr */
function axisNumber(y, incr) {
	if (y && incr < 1e-4) {
		const places = Math.floor(Math.log10(Math.abs(y)) + 1e-9) - Math.floor(Math.log10(incr) + 1e-9);
		return y.toExponential(Math.max(0, places)).replace("e+", "e");
	}
	return incr >= 1e6 ? `${y / 1e6} M` : incr >= 1e4 ? `${y / 1e3} k` : y ? y.toFixed(decimals(incr)) : "0";
}

/** @param {string} name */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
/** @param {number} at */
const stroke = (at) => colour(`s${(at % COLOURS) + 1}`);
/** @param {any[]} values */
export const last = (values) => values.findLast((value) => !missing(value));

/** Exponential moving average without the bias of its start; missing values stay missing.
 * @param {any[]} values @param {number} factor */
function smooth(values, factor) {
	let [sum, weight] = [0, 0];
	return values.map((value) => {
		if (missing(value)) return null;
		sum = factor * sum + (1 - factor) * value;
		weight = factor * weight + 1 - factor;
		return sum / weight;
	});
}

/** The lines of a chart of the catalogue: a column with * stands for all columns that it matches, and a table for its
 * entries. A line has a band if its column has neighbours for one, or if rows were merged.
 * @param {Record<string, string>} series @param {Pick<Columns, "columns" | "get"> & Partial<Columns>} table */
export function lines(series, table) {
	const { columns, minima = {}, maxima = {} } = table;
	return Object.entries(series).flatMap(([label, column]) => {
		const isTable = !column.includes("*") && last(columns[column] ?? []) === undefined;
		const [start, end] = (isTable ? `${column}/*` : column).split("*");
		const names = end === undefined ? [column] : Object.keys(columns).filter((name) =>
			name.startsWith(start) && name.endsWith(end) && name.length > (start + end).length);
		return names.map((name) => {
			const star = name.slice(start.length, name.length - (end?.length ?? 0));
			const [values, base] = [table.get(name), name.replace(/\/value$/, "")];
			const width = name.endsWith("/mean") ? columns[name.replace(/mean$/, "std")] : undefined;
			const edge = (sign) => width && values.map((value, row) =>
				(missing(value) || missing(width[row]) ? null : value + sign * width[row]));
			return {
				column: name, label: isTable ? star : label.replace("*", star), values,
				low: columns[`${base}/low`] ?? edge(-1) ?? minima[name],
				high: columns[`${base}/high`] ?? edge(1) ?? maxima[name],
			};
		});
	});
}

export class Chart {
	x = /** @type {number[]} */ ([]);
	series = /** @type {Line[]} */ ([]);
	entries = /** @type {{button: HTMLElement, value: HTMLElement}[]} */ ([]);
	hidden = /** @type {Set<string>} */ (new Set());
	plot = /** @type {any} */ (null);
	row = /** @type {number | undefined} */ (undefined);
	form = "";
	isNear = false;
	isStale = false;
	isQuiet = false;
	host = h("div.plot");
	legend = h("ul.legend");

	/** @param {import("./board.js").Board} board @param {Definition} definition */
	constructor(board, definition) {
		this.board = board;
		this.definition = definition;
		const { id, title, description, lead } = definition;
		const tip = `about-${id}`;
		const enlarge = () => this.enlarge();
		this.figure = h("figure", {
			class: `card chart${lead ? " lead" : ""}`, tabindex: "0", "data-chart": id, "aria-label": title,
			onkeydown: (event) => this.key(event),
		}, h("figcaption", h("h3", title),
			description && [h("button.info", { "aria-label": `About ${title}`, "aria-describedby": tip }, "i"),
				h("span.tip", { role: "tooltip", id: tip }, description)],
			h("button.info.enlarge", { "aria-label": `Enlarge ${title}`, title: "Enlarge (Enter)", onclick: enlarge }, "⤢")),
		this.host, this.legend);
		this.observer = new ResizeObserver(() => this.resize());
		this.observer.observe(this.host);
	}

	get size() {
		const height = this.figure.classList.contains("wide") ? 360 : this.definition.lead ? 240 : 150;
		return { width: Math.max(120, this.host.clientWidth), height };
	}

	collect() {
		const { x, series } = this.definition.data();
		this.series = series.filter((line) => last(line.values) !== undefined);
		this.x = this.series.length ? x : [];
		const { hide, lead, neutral = 0 } = this.definition;
		const isNeutral = (value) => missing(value) || value === neutral;
		const isFlat = this.series.every(({ values }) => values.every(isNeutral));
		this.isQuiet = hide && !lead && this.series.length > 0 && isFlat;
	}

	/** Draw the chart now if it is near the screen, else when it comes near. again: build it anew.
	 * @param {boolean} [again] */
	draw(again) {
		const { board, definition, series } = this;
		this.figure.hidden = Boolean(definition.hide && (!series.length || (this.isQuiet && board.folds)));
		this.isStale = true;
		if (again) this.form = "";
		if (this.isNear) this.paint();
	}

	/** @param {boolean} isNear */
	approach(isNear) {
		this.isNear = isNear;
		if (isNear) this.paint();
	}

	paint() {
		if (!this.isStale || this.figure.hidden) return;
		this.isStale = false;
		const { board, series } = this;
		const form = JSON.stringify([series.map(({ label, high }) => [label, !high]), board.smoothing, board.axis]);
		if (form !== this.form) this.build();
		else this.plot?.setData(this.rows());
		this.form = form;
		this.write(this.plot?.cursor.idx);
	}

	// Per series: the line, the measured values if the line is smoothed, and both edges of the band.
	rows() {
		const factor = this.definition.table === "evaluations" ? 0 : this.board.smoothing;
		const drawn = (values) => (values && factor ? smooth(values, factor) : values);
		const rows = this.series.flatMap(({ values, low, high }) =>
			[drawn(values), factor ? values : null, drawn(high), drawn(low)]);
		return [this.x, ...rows.map((row) => row ?? this.x.map(() => null))];
	}

	build() {
		this.plot?.destroy();
		this.plot = null;
		this.entries = this.series.map(({ label }, at) => {
			const value = h("b");
			const pressed = { "aria-pressed": `${!this.hidden.has(label)}`, title: "Show or hide" };
			const key = h("i", { class: at >= COLOURS && "dash", style: { "--c": `var(--s${(at % COLOURS) + 1})` } });
			const button = h("button", { ...pressed, onclick: () => this.toggle(at) }, key, h("span", label), value);
			return { button, value };
		});
		fill(this.legend, this.entries.map(({ button }) => h("li", button)));
		fill(this.host, this.series.length ? null : h("p.empty", this.definition.empty ?? "No values yet"));
		if (this.series.length) this.plot = new uPlot(this.options(), this.rows(), this.host);
		this.write();
	}

	options() {
		const { board, definition } = this;
		const shade = this.series.length > 1 ? "14" : "26";
		const bands = this.series.flatMap(({ high }, at) =>
			(high ? [{ series: [4 * at + 3, 4 * at + 4], fill: stroke(at) + shade }] : []));
		const drag = { x: true, y: false, setScale: false };
		return {
			...this.size, legend: { show: false }, padding: [12, 22, 0, 0], bands,
			series: [{}, ...this.series.flatMap((line, at) => this.strokes(line, at))], axes: this.axes(),
			scales: {
				x: { time: false, range: () => board.range ?? board.extent },
				y: { range: (_, low, high) => bounds(definition, low, high) },
			},
			cursor: {
				y: false, points: { size: 6 }, drag, bind: { dblclick: () => () => board.zoom() },
				sync: { key: board.sync, setSeries: false, filters: { pub: (type) => /move|leave/.test(type) } },
			},
			hooks: { draw: [() => this.marks()], setCursor: [() => this.moved()], setSelect: [() => this.selected()] },
		};
	}

	/** The four series of uPlot for a line, as `rows` has them. @param {Line} line @param {number} at */
	strokes({ label, base }, at) {
		const { span } = this.definition;
		const show = !this.hidden.has(label);
		const none = { show, stroke: null, points: { show: false } };
		const line = { show, stroke: stroke(at), width: 1.6, dash: at >= COLOURS && [5, 4] };
		const paths = uPlot.paths.stepped({ align: -1 });
		const area = { points: { show: false }, paths, fill: `${stroke(at)}66`, fillTo: base };
		const open = { spanGaps: span, points: { size: 5, filter: span ? undefined : isolated } };
		return [{ ...line, ...(base === undefined ? open : area) }, { ...none, stroke: `${stroke(at)}55` }, none, none];
	}

	axes() {
		const { format = "number", lanes } = this.definition;
		const [{ incrs, split }, [, write]] = [AXES[this.board.axis], FORMATS[format]];
		const grid = { stroke: colour("grid"), width: 1 };
		const axis = { stroke: colour("muted"), font: FONT, ticks: { show: false }, grid };
		const vertical = lanes
			? { splits: lanes.map((_, at) => at + LANE / 2), values: () => lanes, grid: { show: false } }
			: { space: 28, ...(format === "bytes" && { incrs: POWERS }),
				values: (_, splits, __, ___, incr) => splits.map((y) => write(y, incr)) };
		return [
			{ ...axis, size: 22, gap: 3, space: 64, incrs, values: (_, splits) => splits.map((x) => split(x)) },
			{ ...axis, gap: 4, ...vertical,
				size: (_, texts) => 14 + 6.2 * Math.max(1, ...(texts ?? []).map((text) => text.length)) },
		];
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
		this.board.zoom([this.plot.posToVal(left, "x"), this.plot.posToVal(left + width, "x")]);
	}

	/** The values of a row, or the latest values, in the legend. @param {number | null} [row] */
	write(row) {
		const [write, { span }] = [writer(this.definition.format), this.definition];
		this.series.forEach(({ values, base }, at) => {
			const value = missing(row) ? last(values) : span ? last(values.slice(0, row + 1)) : values[row];
			this.entries[at].value.textContent = write(base === undefined || missing(value) ? value : (value - base) / LANE);
		});
	}

	/** @param {number} at */
	toggle(at) {
		const { label } = this.series[at];
		const show = this.hidden.delete(label);
		if (!show) this.hidden.add(label);
		for (const row of [1, 2, 3, 4]) this.plot.setSeries(4 * at + row, { show });
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

	/** @param {KeyboardEvent} event */
	key(event) {
		const { key, target } = event;
		const keys = ["ArrowLeft", "ArrowRight", "Home", "End", "+", "-", "0", "Enter"];
		const isOther = event.ctrlKey || event.metaKey || event.altKey || target !== this.figure || !keys.includes(key);
		this.paint();
		if (isOther || !this.plot) return;
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
			const end = (x) => middle + (x - middle) * (key === "+" ? 0.5 : 2);
			this.board.zoom([end(low), end(high)]);
		}
	}

	/** @param {number | undefined} row */
	point(row) {
		const { board, plot, x } = this;
		if (row === undefined) return;
		this.row = row;
		plot.setCursor({ left: plot.valToPos(x[row], "x"), top: 9 }, true, true);
		board.hover(x[row]);
		const values = this.series.map(({ label }, at) => `${label} ${this.entries[at].value.textContent}`);
		board.live.textContent = `${board.readout.textContent}: ${values.join(", ")}`;
	}

	enlarge() {
		this.figure.classList.toggle("wide");
		this.resize();
		this.figure.scrollIntoView({ block: "nearest" });
	}

	resize() {
		const { size, plot } = this;
		const isOther = plot && (size.width !== plot.width || size.height !== plot.height);
		if (isOther && this.host.clientWidth) plot.setSize(size);
	}

	close() {
		this.observer.disconnect();
		this.plot?.destroy();
	}
}

/** Bounds of the vertical axis: 0 is included unless all values are far from it.
 * @param {Definition} definition @param {number} low @param {number} high */
function bounds({ range, format }, low, high) {
	if (range || missing(low)) return range ?? [0, 1];
	const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || (format === "percent" ? 0.05 : 1);
	const top = high + pad;
	const bottom = low >= 0 && (low <= 0.7 * high || low === high) ? 0 : low - pad;
	return [bottom, format === "percent" && high <= 1 ? Math.min(1.02, top) : top];
}

/** Rows of points that no line shows, because both neighbours are missing.
 * @param {any} plot @param {number} index @param {boolean} show */
function isolated(plot, index, show) {
	const values = plot.data[index];
	const isAlone = (row) =>
		!missing(values[row]) && missing(values[row - 1]) && missing(values[row + 1]);
	return show ? null : [...values.keys()].filter(isAlone);
}
