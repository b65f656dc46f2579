// The timeline: what the compute threads do, weight swaps, rows in flight, depths of queues, and waits of the learner.
import { Board, CHART_HELP } from "./board.js";
import { LANE, lines } from "./chart.js";
import { fill, h, later, problem, rowHead, update } from "./element.js";
import { duration } from "./format.js";

const LANES = ["none", "two at once", "other", "learn", "decode"];
const TEXTS = {
	lanes: "Share of the time that is spent on decoding, on learning and on other work (evaluations, parity checks, "
		+ "scoring). On the CPU two of them compute at the same time; the two lowest lanes show how long that was, and how "
		+ "long nothing was computed. Vertical lines are weight swaps.",
	rows: "Sequences that are decoded at the same time.",
	queues: "Messages that wait in each queue between two actors. A full queue names the slower of its two ends.",
	version: "Policy version that the engine samples with.",
};

export class Timeline {
	help = CHART_HELP;
	waits = h("section.card.where");
	board = new Board("time", () => this.table.marks.map((x) => ({ x, kind: "swap", text: "weight swap" })),
		{ key: "t", step: "t", time: "t" });
	keys = this.board.keys;
	changed = later(250, () => {
		this.board.refresh();
		this.board.explain(this.table);
	});

	/** @param {HTMLElement} container @param {Place} _place @param {Context} context */
	constructor(container, _place, { run }) {
		this.run = run;
		this.table = run.tables.timeline;
		this.board.zoomed = () => {
			this.waiting();
			this.board.sharpen(run, "timeline");
		};
		fill(container, h("h1", "Timeline"), this.board.toolbar({ axis: false, smoothing: false }),
			this.chart("lanes", "Compute threads", {},
				{ lanes: LANES, range: [0, 5], format: "percent", data: () => this.lanes() }),
			h("div.grid.below", this.chart("rows", "Rows in flight", { rows: "rows" }),
				this.chart("queues", "Depth of the queues", { "*": "queues/*" }),
				this.chart("version", "Policy version", { version: "version" })), this.waits);
		run.load("timeline").then(this.changed, (error) => container.append(problem(error.message)));
	}

	/** @param {keyof typeof TEXTS} id @param {string} title @param {Record<string, string>} series
	 * @param {Partial<Definition>} [other] */
	chart(id, title, series, other) {
		const data = () => ({ x: this.table.get("t"), series: lines(series, this.table) });
		const empty = "No timeline: the run wrote no timeline.jsonl";
		return this.board.add({ id, title, series, description: TEXTS[id], empty, data, ...other });
	}

	/** Seconds of each line in which nothing was computed. @param {number[]} x */
	idle(x) {
		const [decode, learn, other, overlap] = ["decode", "learn", "other", "overlap"].map((name) => this.table.get(name));
		const busy = (row) => decode[row] + learn[row] + other[row] - (overlap[row] ?? 0);
		return x.map((t, row) => Math.max(0, t - (x[row - 1] ?? 0) - busy(row)));
	}

	// The share of each kind of work between two lines.
	lanes() {
		const x = this.table.get("t");
		const series = LANES.map((label, base) => {
			const seconds = label === "none" ? this.idle(x) : this.table.get(label === "two at once" ? "overlap" : label);
			const share = (t, row) => (seconds[row] ?? 0) / (t - (x[row - 1] ?? 0)) || 0;
			return { label, base, values: x.map((t, row) => base + LANE * Math.min(1, share(t, row))) };
		}).reverse();
		return { x, series };
	}

	waiting() {
		const [x, texts, sums] = [this.table.get("t"), this.table.get("waiting"), new Map()];
		const [low, high] = this.board.range ?? [0, Infinity];
		x.forEach((t, row) => {
			const text = texts[row]?.replace(/\d+/g, "…");
			if (text && t >= low && t <= high) sums.set(text, (sums.get(text) ?? 0) + t - (x[row - 1] ?? 0));
		});
		const rows = [...sums].sort((a, b) => b[1] - a[1]);
		const bar = (seconds) => h("td.bar", h("span", { style: { width: `${(100 * seconds) / rows[0][1]}%` } }));
		update(this.waits, h("h3", "What the learner waits for"), rows.length
			? h("table", rows.map(([text, seconds]) => h("tr", rowHead(text), h("td.num", duration(seconds)), bar(seconds))))
			: h("p.muted", "It did not wait."));
	}

	update(run, changed) {
		if (run === this.run && changed.includes("timeline")) this.changed();
	}

	close() {
		this.changed.cancel();
		this.board.close();
	}
}
