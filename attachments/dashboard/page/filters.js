// Filters of the list of groups. The query of the address is their only form: outcome=stale&min_reward=0.5&sort=-step.

export const COLUMNS = {
	group_id: "group", step: "step", outcome: "outcome", type: "type", environment: "environment",
	completions: "size", reward_mean: "reward", reward_spread: "spread", length_mean: "length",
	version_min: "versions", truncated: "truncated", prompt: "prompt",
};
/** @typedef {Record<keyof typeof COLUMNS | "version_max", any[]>} GroupColumns */
export const CHOICES = /** @type {("outcome" | "type" | "environment")[]} */ (["outcome", "type", "environment"]);
/** The columns of the lower and the upper end of a range. A group passes if its range overlaps that of the filter.
 * @type {Record<string, [keyof GroupColumns, keyof GroupColumns]>} */
export const RANGES = Object.assign(Object.create(null), { // names come from the address
	step: ["step", "step"], reward: ["reward_mean", "reward_mean"], spread: ["reward_spread", "reward_spread"],
	length: ["length_mean", "length_mean"], version: ["version_min", "version_max"],
});
const SIGNS = /** @type {Record<string, string>} */ (Object.assign(Object.create(null), { min: "≥", max: "≤" }));

/** [key, value, description] of each active filter. @param {URLSearchParams} query */
export function active(query) {
	const ends = [...query].map(([key, value]) => [key, value, ...key.split("_")]);
	const isFilter = (/** @type {string[]} */ [key, value, end, name]) =>
		value && (SIGNS[end] ? name in RANGES : [...CHOICES, "text", "truncated"].includes(key));
	return ends.filter(isFilter).map(([key, value, end, name]) =>
		[key, value, name ? `${name} ${SIGNS[end]} ${value}` : `${key}: ${value}`]);
}

/** Rows of the groups that pass, in order, and per choice the number of groups of each value under all other filters.
 * @param {GroupColumns} columns @param {URLSearchParams} query @param {Set<number> | null} matches */
function apply(columns, query, matches) {
	const tests = matches ? [(row) => matches.has(columns.group_id[row])] : [];
	const limit = (text, values, passes) =>
		text && tests.push((row) => values[row] !== null && passes(values[row], Number(text)));
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
		for (const [i, count] of counts.entries()) {
			count.set(values[i], (count.get(values[i]) ?? 0) + Number(failures === failed[i]));
		}
		return !failures;
	});
	return { counts, rows: rows.sort(comparison(columns, query.get("sort") ?? "-group_id")) };
}

/** Missing values are last in both directions. Groups of equal value are in the order of their ids.
 * @param {GroupColumns} columns @param {string} sort */
function comparison(columns, sort) {
	const values = columns[sort.replace("-", "")] ?? columns.group_id;
	const sign = sort[0] === "-" ? -1 : 1;
	return (a, b) => {
		const [x, y] = [values[a], values[b]];
		if (x === y) return columns.group_id[a] - columns.group_id[b];
		return x === null ? 1 : y === null ? -1 : x < y ? -sign : sign;
	};
}

// The groups of a run, searched through the API.
export class GroupIndex {
	matches = /** @type {Set<number> | null} */ (null);
	text = "";

	/** @param {Run} run */
	constructor(run) {
		this.run = run;
		this.table = run.tables.groups;
		this.ready = run.load("groups");
	}

	/** @returns {GroupColumns} */
	get columns() {
		const names = ["version_max", ...Object.keys(COLUMNS)];
		return Object.assign(Object.create(null), Object.fromEntries(names.map((name) => [name, this.table.get(name)])));
	}

	/** @param {URLSearchParams} query */
	async select(query) {
		await this.ready;
		const text = query.get("text") ?? "";
		if (text !== this.text) {
			const found = text && await this.run.get(`groups/search?text=${encodeURIComponent(text)}`);
			this.matches = found ? new Set(found.group_ids) : null;
			this.text = text;
		}
		return apply(this.columns, query, this.matches);
	}
}
