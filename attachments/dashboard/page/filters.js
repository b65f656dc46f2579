// Filters of the list of groups. The query of the address is their only form: outcome=stale&min_reward=0.5&sort=-step.
import { Columns } from "./source.js";

export const COLUMNS = {
	group_id: "group", step: "step", outcome: "outcome", type: "type", environment: "environment", completions: "size", reward_mean: "reward",
	reward_spread: "spread", length_mean: "length", version_min: "versions", truncated: "truncated", prompt: "prompt",
};
export const CHOICES = ["outcome", "type", "environment"];
// The columns of the lower and the upper end of a range. A group passes if its range overlaps that of the filter.
export const RANGES = {
	__proto__: null, // names come from the address
	step: ["step", "step"], reward: ["reward_mean", "reward_mean"], spread: ["reward_spread", "reward_spread"],
	length: ["length_mean", "length_mean"], version: ["version_min", "version_max"],
};
const SIGNS = { __proto__: null, min: "≥", max: "≤" };

// [key, value, description] of each active filter.
export function active(query) {
	const ends = [...query].map(([key, value]) => [key, value, ...key.split("_")]);
	return ends.filter(([key, value, end, name]) => value && (SIGNS[end] ? name in RANGES : [...CHOICES, "text", "truncated"].includes(key)))
		.map(([key, value, end, name]) => [key, value, name ? `${name} ${SIGNS[end]} ${value}` : `${key}: ${value}`]);
}

// Rows of the groups that pass, in order, and per choice the number of groups of each value under all other filters.
function apply(columns, query, matches) {
	const tests = matches ? [(row) => matches.has(columns.group_id[row])] : [];
	const limit = (text, values, passes) => text && tests.push((row) => values[row] !== null && passes(values[row], Number(text)));
	for (const [name, [low, high]] of Object.entries(RANGES)) {
		limit(query.get(`min_${name}`), columns[high], (value, end) => value >= end);
		limit(query.get(`max_${name}`), columns[low], (value, end) => value <= end);
	}
	limit(query.get("truncated"), columns.truncated, (value) => value > 0);
	const chosen = CHOICES.map((name) => new Set(query.getAll(name)));
	const counts = CHOICES.map(() => new Map());
	const rows = columns.group_id.map((_, row) => row).filter((row) => {
		if (!tests.every((test) => test(row))) return false;
		const values = CHOICES.map((name) => columns[name][row] || "none");
		const failed = chosen.map((names, i) => Number(names.size > 0 && !names.has(values[i])));
		const failures = failed.reduce((a, b) => a + b);
		counts.forEach((count, i) => count.set(values[i], (count.get(values[i]) ?? 0) + Number(failures === failed[i])));
		return !failures;
	});
	return { counts, rows: rows.sort(comparison(columns, query.get("sort") ?? "-group_id")) };
}

// Missing values are last in both directions. Groups of equal value are in the order of their ids.
function comparison(columns, sort) {
	const values = columns[sort.replace("-", "")] ?? columns.group_id;
	const sign = sort[0] === "-" ? -1 : 1;
	return (a, b) => {
		const [x, y] = [values[a], values[b]];
		if (x === y) return columns.group_id[a] - columns.group_id[b];
		return x === null ? 1 : y === null ? -1 : x < y ? -sign : sign;
	};
}

// The groups of a run: loaded through the API, extended by live events, and searched through the API.
export class GroupIndex {
	constructor({ runId, source }) {
		this.api = (path) => source.get(`runs/${runId}/groups${path}`);
		this.groups = new Columns("group_id");
		const none = Object.fromEntries(["version_max", ...Object.keys(COLUMNS)].map((name) => [name, []]));
		this.ready = this.api("").then((found) => {
			this.dropped = found.dropped;
			this.groups.load({ columns: { group_id: [], ...none, ...found.columns } });
		});
	}

	async select(query) {
		await this.ready;
		const text = query.get("text");
		if (text !== this.text) {
			this.matches = text && new Set((await this.api(`/search?text=${encodeURIComponent(text)}`)).group_ids);
			this.text = text;
		}
		return apply(this.groups.columns, query, this.matches);
	}
}
