// Untrusted text, names and exact numbers for display.
import { h } from "./element.js";
import { MISSING, missing, number } from "./format.js";

// Controls, spaces, and characters that change the direction or the width of text.
// biome-ignore lint/suspicious/noMisleadingCharacterClass: the combining character is meant alone
const HIDDEN = /[\0-\u0020\u007f-\u00a0\u00ad\u034f\u061c\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff]/g;
const SYMBOLS = { " ": "·", "\n": "↵\n", "\t": "→\t" };

/** @param {string} character */
function code(character) {
	return `U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** The text with a symbol for each control character and each space. @param {string} text */
export function visible(text) {
	return text.replace(HIDDEN, (character) => SYMBOLS[character] ?? `⟨${code(character)}⟩`);
}

/** How often a text contains each invisible character except space, tab and newline: "U+202E × 2".
 * @param {string} text */
export function hidden(text) {
	const counts = /** @type {Map<string, number>} */ (new Map());
	for (const [character] of text.matchAll(HIDDEN)) {
		if (!(character in SYMBOLS)) counts.set(code(character), (counts.get(code(character)) ?? 0) + 1);
	}
	return [...counts].map(([name, count]) => `${name} × ${count}`).join(", ");
}

/** A float32 value with as many digits as identify it. @param {number | null} value */
export function exact(value) {
	if (missing(value)) return MISSING;
	const isExact = (digits) => Math.fround(Number(value.toPrecision(digits))) === Math.fround(value);
	const digits = [5, 6, 7, 8].find(isExact) ?? 9;
	return String(Number(value.toPrecision(digits)));
}

/** @param {number | null} first @param {number | null} last */
export function versions(first, last) {
	return missing(first) || first === last ? first ?? MISSING : `${first}–${last}`;
}

/** @param {string} outcome */
export function state(outcome) {
	return h("span.result", { "data-outcome": outcome }, outcome.replaceAll("_", " "));
}

/** The text from `start` to `stop`, each turn of an episode under its title. show: makes the text between two places.
 * @param {Turn[]} turns @param {string} unit @param {number} start @param {number} stop
 * @param {(from: number, to: number) => any} show */
export function inTurns(turns, unit, start, stop, show) {
	if (!turns.length) return show(start, stop);
	let [at, message, tools] = [0, 0, ""];
	return turns.map((turn) => {
		const [from, end] = [at, at + turn[unit]];
		at = end;
		if (turn.sampled) [message, tools] = [message + 1, turn.tools?.length ? ` (${turn.tools.join(", ")})` : ""];
		const isOutside = end === from ? end < start || from > stop : end <= start || from >= stop;
		if (isOutside) return null;
		const [by, mask] = turn.sampled ? [`policy, message ${message}`, ""] : ["environment", ", not trained on"];
		const title = h("b.turn", `${by}${tools}: ${number(turn.tokens)} tokens${mask}`);
		return [title, show(Math.max(from, start), Math.min(end, stop))];
	});
}
