// The timeline: what the compute threads do, weight swaps, rows in flight, depths of the queues, and waits of the learner.
import { Board, CHART_HELP, LANE, lines } from "./charts.js";
import { fill, h, later, problem, rowHead } from "./element.js";
import { duration } from "./format.js";

const LANES = ["none", "two at once", "other", "learn", "decode"];
const TEXTS = {
	lanes: "Share of the time that is spent on decoding, on learning and on other work (evaluations, parity checks, scoring). On the CPU two of them compute at the same time; the two lowest lanes show how long that was, and how long nothing was computed. Vertical lines are weight swaps.",
	rows: "Sequences that are decoded at the same time.",
	queues: "Messages that wait in each queue between two actors. A queue that stays full names the slower of its two ends.",
	version: "Policy version that the engine samples with.",
};

export function show(container, parameters, { runId, source: { get, Columns } }) {
	const table = new Columns("t");
	const swaps = new Set();
	let lost = 0;
	const board = new Board("time", () => [...swaps].map((x) => ({ x, kind: "swap", text: "weight swap" })));
	const changed = later(250, () => {
		board.refresh();
		board.explain([table], lost);
	});
	const waits = h("section.card.where");

	// Seconds of each line in which nothing was computed.
	function idle(x) {
		const [decode, learn, other, overlap] = ["decode", "learn", "other", "overlap"].map((name) => table.get(name));
		return x.map((t, row) => Math.max(0, t - (x[row - 1] ?? 0) - decode[row] - learn[row] - other[row] + (overlap[row] ?? 0)));
	}

	// The share of each kind of work between two lines.
	function lanes() {
		const x = table.get("t");
		return {
			x,
			series: LANES.map((label, base) => {
				const seconds = label === "none" ? idle(x) : table.get(label === "two at once" ? "overlap" : label);
				return { label, base, values: x.map((t, row) => base + LANE * Math.min(1, (seconds[row] ?? 0) / (t - (x[row - 1] ?? 0)) || 0)) };
			}).reverse(),
		};
	}

	function waiting() {
		const [x, texts, sums] = [table.get("t"), table.get("waiting"), new Map()];
		const [low, high] = board.range ?? [0, Infinity];
		x.forEach((t, row) => {
			const text = texts[row]?.replace(/\d+/g, "…");
			if (text && t >= low && t <= high) sums.set(text, (sums.get(text) ?? 0) + t - (x[row - 1] ?? 0));
		});
		const rows = [...sums].sort((a, b) => b[1] - a[1]);
		fill(waits, h("h3", "What the learner waits for"), rows.length ? h("table", rows.map(([text, seconds]) => h("tr", rowHead(text),
			h("td.num", duration(seconds)), h("td.bar", h("span", { style: { width: `${(100 * seconds) / rows[0][1]}%` } }))))) : h("p.muted", "It did not wait."));
	}

	const chart = (id, title, series) => board.add({ id, title, description: TEXTS[id], empty: "No timeline: the run wrote no timeline.jsonl", data: () => ({ x: table.get("t"), series: lines(series, table) }) });
	board.zoomed = () => {
		waiting();
		board.sharpen(table, `runs/${runId}/timeline`, () => table.get("t"));
	};
	fill(container, h("h1", "Timeline"), board.toolbar({ axis: false, smoothing: false }),
		board.add({ id: "lanes", title: "Compute threads", description: TEXTS.lanes, empty: "No timeline: the run wrote no timeline.jsonl", lanes: LANES, range: [0, 5], format: "percent", data: lanes }),
		h("div.grid.below", chart("rows", "Rows in flight", [{ label: "rows", column: "rows" }]), chart("queues", "Depth of the queues", [{ label: "*", column: "queues/*" }]),
			chart("version", "Policy version", [{ label: "version", column: "version" }])), waits);
	get(`runs/${runId}/timeline`).then((found) => {
		table.load(found);
		found.marks.forEach((t) => swaps.add(t));
		lost = found.lost_marks;
		changed();
	}, (error) => container.append(problem(error.message)));
	return {
		update(kind, data) {
			if (kind !== "timeline") return;
			data.marks.forEach((t) => swaps.add(t));
			if (table.add(data)) changed();
		},
		close() {
			changed.cancel();
			board.close();
		},
		keys: board.keys,
		help: CHART_HELP,
	};
}
