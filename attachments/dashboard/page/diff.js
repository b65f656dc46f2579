// The difference of two texts: a longest common subsequence of their words, tokens or lines.
import { h } from "./element.js";
import { number } from "./format.js";
import { visible } from "./text.js";

const CELLS = 16e6; // of the table of lengths, two bytes each; longer texts are compared by line
const LONGEST = 20000; // characters of one run on the screen
const LINES = /[^\n]*\n|[^\n]+$/g;
const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
export const LEVELS = ["word", "token", "line"];

/** Runs [kind, text] that turn the pieces a into b: -1 is only in a, 1 only in b, 0 in both. null: too long.
 * @param {string[]} a @param {string[]} b */
function edits(a, b) {
	let [start, n, m] = [0, a.length, b.length];
	while (start < n && start < m && a[start] === b[start]) start += 1;
	for (; n > start && m > start && a[n - 1] === b[m - 1]; n -= 1) m -= 1;
	const width = m - start + 1;
	const cells = (n - start + 1) * width;
	if (cells > CELLS || Math.min(n, m) - start > 65535) return null;
	const common = new Uint16Array(cells); // length of the longest common subsequence of a[i:n] and b[j:m]
	const at = (i, j) => (i - start) * width + j - start;
	for (let i = n - 1; i >= start; i -= 1) {
		for (let j = m - 1; j >= start; j -= 1) {
			const longer = Math.max(common[at(i + 1, j)], common[at(i, j + 1)]);
			common[at(i, j)] = a[i] === b[j] ? common[at(i + 1, j + 1)] + 1 : longer;
		}
	}
	const runs = /** @type {[number, string][]} */ ([[0, a.slice(0, start).join("")]]);
	const add = (kind, text) => {
		if (runs.at(-1)[0] === kind) runs.at(-1)[1] += text;
		else runs.push([kind, text]);
	};
	for (let [i, j] = [start, start]; i < n || j < m;) {
		const isSame = i < n && j < m && a[i] === b[j];
		const isFirst = isSame || j === m || (i < n && common[at(i + 1, j)] >= common[at(i, j + 1)]);
		add(isSame ? 0 : isFirst ? -1 : 1, isFirst ? a[i] : b[j]);
		if (isFirst) i += 1;
		if (isSame || !isFirst) j += 1;
	}
	add(0, a.slice(n).join(""));
	return runs;
}

/** @typedef {{text: string, tokens?: string[]}} Side */

/** Compare two texts. Those that are too long are compared by line, then as a whole.
 * @param {Side} left @param {Side} right @param {string} wanted */
export function compare(left, right, wanted) {
	for (const level of [wanted === "token" && !(left.tokens && right.tokens) ? "word" : wanted, "line"]) {
		const pieces = level === "line" ? LINES : WORDS;
		const [a, b] = [left, right].map(({ text, tokens }) => (level === "token" ? tokens : text.match(pieces) ?? []));
		const runs = edits(a, b);
		if (runs) return { level, runs };
	}
	return { level: "text", runs: [[-1, left.text], [1, right.text]] };
}

/** A row ends after each newline of both texts. The style hides insertions in the left half of a row and deletions in
 * the right half; a narrow screen shows the left half with both.
 * @param {{runs: [number, string][]}} compared @param {boolean} symbols */
export function diffView({ runs }, symbols) {
	const rows = [[]];
	for (const [kind, text] of runs) {
		for (const piece of kind ? [text] : text.match(LINES) ?? []) {
			rows.at(-1).push([kind, piece]);
			if (!kind && piece.endsWith("\n")) rows.push([]);
		}
	}
	const shown = (text) => (symbols ? visible(text) : text);
	const run = ([kind, text]) => h(["del", "span", "ins"][kind + 1], null, shown(text.slice(0, LONGEST)),
		text.length > LONGEST && `… ${number(text.length - LONGEST)} more characters`);
	const half = (side, row) => h("div", { class: `text ${side}` }, row.map(run));
	return h("div.diff", rows.map((row) => [half("left", row), half("right", row)]));
}
