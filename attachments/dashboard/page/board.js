// A board of charts over a common horizontal axis: zoom, smoothing, marks and keys. Charts near the screen are drawn.
import { AXES, Chart, writer } from "./chart.js";
import { fill, h } from "./element.js";
import { missing, number } from "./format.js";
import { exported } from "./source.js";

const WEIGHTS = ["0", "0.5", "0.8", "0.9", "0.95"]; // of earlier values in a smoothed one
const NEAR = "50%"; // of the screen, above and below it

export const CHART_HELP = [
	["j / k", "next / previous chart"], ["← →", "value before / after, in a chart"],
	["+ − 0", "zoom in, out, to the whole run"], ["Enter", "enlarge the chart"],
	["drag", "zoom; a double click shows the whole run"],
];

export class Board {
	smoothing = 0;
	marked = true;
	folds = true;
	range = /** @type {[number, number] | null} */ (null);
	extent = /** @type {[number, number]} */ ([0, 1]);
	charts = /** @type {Chart[]} */ ([]);
	found = /** @type {Mark[]} */ ([]);
	sync = `${Math.random()}`;
	asked = new Map();
	zoomed = () => {};
	readout = h("span.readout");
	reset = h("button.button", { hidden: true, onclick: () => this.zoom() }, "Reset zoom");
	live = h("span.sr", { "aria-live": "polite" });
	note = h("p.muted.thinned");
	quiet = h("p.muted.quiet");
	dark = matchMedia("(prefers-color-scheme: dark)");
	keys = { j: () => this.move(1), k: () => this.move(-1) };

	/** columns: of each axis, and the one that orders rows.
	 * @param {"step" | "time"} axis @param {(axis: string) => Mark[]} marks */
	constructor(axis, marks = () => [], columns = { key: "step", step: "step", time: "time/run" }) {
		this.columns = columns;
		this.axis = axis;
		this.marks = marks;
		this.dark.onchange = () => this.charts.forEach((chart) => { chart.draw(true); });
		this.observer = new IntersectionObserver((entries) => {
			for (const { target, isIntersecting } of entries) {
				this.charts.find(({ figure }) => figure === target)?.approach(isIntersecting);
			}
		}, { rootMargin: NEAR });
	}

	toolbar({ axis = true, smoothing = true, marks = true }, ...more) {
		const choose = (label, options, set) =>
			h("label", label, h("select", { onchange: ({ target }) => {
				set(target.value);
				this.range = null;
				this.refresh();
			} }, options.map((text) => h("option", text))));
		const mark = h("input", { type: "checkbox", checked: true, onchange: () => {
			this.marked = mark.checked;
			this.refresh();
		} });
		return h("div.toolbar", h("h2.sr", "Charts"),
			axis && choose("Axis", ["step", "time"], (name) => { this.axis = name; }),
			smoothing && choose("Smoothing", WEIGHTS, (weight) => { this.smoothing = Number(weight); }),
			marks && h("label", mark, "Marks", h("span.mark", "| weight swap"),
				axis && [h("span.mark.eval", "evaluation"), h("span.mark.find", "finding")]),
			more, this.reset, this.readout, this.live, this.note);
	}

	/** @param {Definition} definition */
	add(definition) {
		const chart = new Chart(this, definition);
		this.charts.push(chart);
		this.observer.observe(chart.figure);
		return chart.figure;
	}

	/** @param {HTMLElement} figure */
	remove(figure) {
		const at = this.charts.findIndex((chart) => chart.figure === figure);
		this.observer.unobserve(figure);
		this.charts.splice(at, 1)[0].close();
		figure.remove();
	}

	refresh() {
		this.found = this.marks(this.axis).filter((mark) => !missing(mark.x));
		for (const chart of this.charts) chart.collect();
		const ends = this.charts.flatMap(({ x }) => (x.length ? [x[0], x.at(-1)] : []));
		const low = ends.length ? Math.min(...ends) : 0;
		this.extent = [low, Math.max(low + 1, ...ends)];
		this.zoom(this.range);
		const quiet = this.charts.filter((chart) => chart.isQuiet).map(({ definition: { title, format, neutral = 0 } }) =>
			`${title} ${writer(format)(neutral)}`);
		const turn = () => {
			this.folds = !this.folds;
			this.refresh();
		};
		fill(this.quiet, quiet.length > 0 && [`Quiet: ${quiet.join(" · ")} `,
			h("button.button.small", { onclick: turn }, this.folds ? "Show" : "Hide")]);
	}

	/** @param {[number, number] | null} [range] */
	zoom(range) {
		const [low, high] = this.extent;
		const isPart = range && (range[0] > low || range[1] < high);
		this.range = isPart ? [Math.max(low, range[0]), Math.min(high, range[1])] : null;
		this.reset.hidden = !this.range;
		for (const chart of this.charts) chart.draw();
		this.zoomed();
	}

	/** The values of the horizontal axis. @param {Columns} table */
	along(table) {
		return table.get(this.columns[this.axis]);
	}

	/** The lines of the zoomed range take the place of its merged rows. @param {Run} run @param {Kind} kind */
	async sharpen(run, kind) {
		const key = this.columns.key;
		const table = run.tables[kind];
		if (exported || !this.range || !table.length) return;
		const [x, axis, [low, high]] = [this.along(table), table.get(key), this.range];
		const first = Math.max(0, x.findIndex((at) => at >= low));
		const end = x.findIndex((at) => at >= high);
		const stop = end < 0 ? x.length - 1 : end;
		const address = `${kind}?from=${axis[first]}&to=${axis[stop]}`;
		if (this.asked.get(table) === address || table.thinning(first, stop + 1) === 1) return;
		this.asked.set(table, address);
		try {
			const found = await run.get(address);
			if (this.asked.get(table) !== address) return; // zoomed again
			table.replace(found, key);
			this.refresh();
		} catch (error) {
			this.readout.textContent = error.message;
		}
	}

	/** Say what the charts do not show. @param {Columns[]} tables */
	explain(...tables) {
		const lines = Math.max(...tables.map((table) => table.thinning()));
		const [lost, damaged] = [tables[0].lost, tables.reduce((sum, table) => sum + table.damaged, 0)];
		const more = exported ? "The run has every line: clotho view RUN. " : "A zoom shows every line. ";
		const means = "it is their mean, and the band reaches from the least to the largest value.";
		this.note.textContent = [
			lines > 1 && `A point stands for up to ${number(lines)} lines: ${means} ${more}`,
			lost > 0 && `The first ${number(lost)} marks are not shown. `,
			damaged > 0 && `${number(damaged)} lines are damaged and left out.`].filter(Boolean).join("");
	}

	/** @param {number} x */
	hover(x) {
		const near = this.axis === "step" ? 0.5 : (this.extent[1] - this.extent[0]) / 200;
		const texts = this.found.filter((mark) => Math.abs(mark.x - x) < near).map((mark) => mark.text);
		this.readout.textContent = missing(x) ? "" : [AXES[this.axis].text(x), ...new Set(texts)].join(" · ");
	}

	/** @param {number} by */
	move(by) {
		const figures = this.charts.map(({ figure }) => figure).filter((figure) => !figure.hidden);
		const at = figures.findIndex((figure) => figure.contains(document.activeElement));
		figures[Math.max(0, Math.min(figures.length - 1, at + by))]?.focus();
	}

	close() {
		this.dark.onchange = null;
		this.observer.disconnect();
		for (const chart of this.charts) chart.close();
	}
}
