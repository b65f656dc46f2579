// Untrusted text, names and exact numbers for display.
import { h } from "./element.js";
import { MISSING, missing } from "./format.js";

// Controls, spaces, and characters that change the direction or the width of text.
const INVISIBLE = /[\0-\u0020\u007f-\u00a0\u00ad\u034f\u061c\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff]/g;
const SYMBOLS = { " ": "·", "\n": "↵\n", "\t": "→\t" };

function code(character) {
	return `U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

// The text with a symbol for each control character and each space.
export function visible(text) {
	return text.replace(INVISIBLE, (character) => SYMBOLS[character] ?? `⟨${code(character)}⟩`);
}

// How often a text contains each invisible character except space, tab and newline: "U+202E × 2".
export function hidden(text) {
	const counts = {};
	for (const [character] of text.matchAll(INVISIBLE)) if (!(character in SYMBOLS)) counts[code(character)] = (counts[code(character)] ?? 0) + 1;
	return Object.entries(counts).map(([name, count]) => `${name} × ${count}`).join(", ");
}

// A float32 value with as many digits as identify it.
export function exact(value) {
	if (missing(value)) return MISSING;
	const digits = [5, 6, 7, 8].find((count) => Math.fround(value.toPrecision(count)) === Math.fround(value)) ?? 9;
	return String(Number(value.toPrecision(digits)));
}

export function versions(first, last) {
	return missing(first) || first === last ? first ?? MISSING : `${first}–${last}`;
}

export function state(outcome) {
	return h("span.result", { "data-outcome": outcome }, outcome.replaceAll("_", " "));
}
