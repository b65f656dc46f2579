// The tokens of a completion: their colours by one of their values, the legend, and all values of one token.
import { h, rowHead } from "./element.js";
import { missing, number } from "./format.js";
import { exact, visible } from "./text.js";

export const OVERLAYS = {
	sampled_logprob: "log-probability at sampling", learner_logprob: "log-probability at learning",
	ratio: "importance ratio", version: "policy version", advantage: "advantage", cut: "cut",
	gradient_share: "share of the gradient", none: "nothing",
};
const CUTS = ["not cut", "clip range", "importance correction", "mask", "not trained on"];

// Orange, blue and purple differ for all common kinds of colour blindness. Text stays readable on 60 % of a colour.
const [ORANGE, BLUE, PURPLE] = ["225, 105, 0", "25, 105, 235", "150, 60, 215"];
const CUT_COLOURS = [BLUE, ORANGE, BLUE, PURPLE, "130, 130, 130"];
/** @param {number} low @param {number} value @param {number} high */
const limited = (low, value, high) => Math.max(low, Math.min(high, value));

/** at: position of a value from -1 to 1. stops: values of the legend.
 * @typedef {{at: (value: number) => number, stops: number[], colour?: string, note?: string}} Scale */

/** The scale of a value over the completions of a group; null if no token has the value. byRank: the position of a
 * log-probability is its place among all of the group.
 * @param {string} name @param {(TokenValues | null)[]} completions @param {boolean} byRank @returns {Scale | null} */
export function scaleOf(name, completions, byRank) {
	const values = completions.flatMap((completion) => completion?.[name] ?? []).filter((value) => !missing(value));
	if (!values.length) return null;
	values.sort((a, b) => b - a);
	const [low, high] = [values.at(-1), values[0]];
	if (byRank && name.endsWith("logprob")) return ranks(values);
	const size = Math.max(-low, high) || 1;
	const factor = limited(Math.log(1.05), Math.max(-Math.log(low), Math.log(high)), Math.log(4));
	const ends = [-1, -0.5, 0, 0.5, 1];
	const surprise = { at: (value) => Math.sqrt(limited(0, -value / 8, 1)), stops: [0, -0.5, -2, -4.5, -8] };
	const ratio = (value) => Math.sign(Math.log(value)) * Math.sqrt(limited(0, Math.abs(Math.log(value)) / factor, 1));
	return {
		sampled_logprob: surprise,
		learner_logprob: surprise,
		ratio: { at: ratio, stops: ends.map((end) => Math.exp(end * Math.abs(end) * factor)) },
		version: { at: (value) => 0.15 + (0.85 * (value - low)) / (high - low || 1), colour: BLUE,
			stops: [...new Set([0, 0.25, 0.5, 0.75, 1].map((end) => Math.round(low + end * (high - low))))] },
		advantage: { at: (value) => value / size, stops: ends.map((end) => end * size) },
		cut: { at: Math.sign, stops: [0, 1, 2, 3, 4] },
		gradient_share: { at: (value) => Math.sqrt(value / size), colour: PURPLE,
			stops: [0, 0.25, 0.5, 1].map((end) => end ** 2 * size) },
	}[name];
}

/** The colour grows with the share of more probable tokens, slowly at first, so that the least probable stand out.
 * @param {number[]} values */
function ranks(values) {
	const places = new Map();
	values.forEach((value, place) => {
		if (!places.has(value)) places.set(value, (place / (values.length - 1 || 1)) ** 2);
	});
	return { at: (value) => places.get(value), note: "by rank among the tokens of the group",
		stops: [...new Set([0, 0.5, 0.75, 0.9, 1].map((end) => values[Math.round(end * (values.length - 1))]))] };
}

/** @param {HTMLElement} element @param {string} name @param {Scale} scale @param {number | null} value */
function paint(element, name, scale, value) {
	const at = missing(value) ? 0 : scale.at(value);
	const colour = name === "cut" ? CUT_COLOURS[value] : scale.colour ?? (at < 0 ? BLUE : ORANGE);
	if (at) element.style.backgroundColor = `rgba(${colour}, ${(0.6 * Math.abs(at)).toFixed(3)})`;
	element.classList.toggle("low", at < -0.1);
	return element;
}

/** @param {string} name @param {Scale} scale */
export function legend(name, scale) {
	const swatch = (cut) => h("i", { class: `swatch cut${cut}` }, "ab");
	const isLowest = (value, i) => i === 4 && value === -8 && !scale.note;
	const stops = scale.stops.map((value, i) => h("li", paint(swatch(name === "cut" ? value : 0), name, scale, value),
		name === "cut" ? CUTS[value] : `${isLowest(value, i) ? "≤ " : ""}${number(value)}`));
	const notes = { ratio: "hatched: below 1", advantage: "hatched: below 0", version: "a bar marks each new version" };
	const note = scale.note ?? notes[name];
	return h("ul.scale", stops, note && h("li", note),
		name !== "cut" && [h("li.muted", "no gradient:"), [1, 2, 3, 4].map((cut) => h("li", swatch(cut), CUTS[cut]))]);
}

/** The elements of the tokens from `start` to `end`, each with its position as `at`. @param {TokenValues} values
 * @param {number} start @param {number} end @param {{name: string, scale: Scale | null, symbols: boolean}} how */
export function elements(values, start, end, { name, scale, symbols }) {
	return values.text.slice(start, end).map((text, i) => {
		const at = start + i;
		const isSwap = at > 0 && values.version[at] !== values.version[at - 1];
		const kind = `t cut${values.cut[at]}${isSwap ? " swap" : ""}`;
		const element = h("span", { class: kind }, symbols ? visible(text) : text);
		element.at = at;
		return scale ? paint(element, name, scale, values[name][at]) : element;
	});
}

/** All values of one token, as numbers. @param {TokenValues} values @param {number} at */
export function tokenTable(values, at) {
	const row = (title, name, text, note = "") =>
		h("tr", rowHead(title), h("td", h("span", { "data-value": name }, text), h("span.muted", note)));
	const { none, cut, ...numbers } = OVERLAYS;
	const probability = (name) => (name.endsWith("logprob") && !missing(values[name][at])
		? ` p = ${number(Math.exp(values[name][at]))}` : "");
	return h("table", row("token", "text", h("code", visible(values.text[at]) || "no text")),
		row("id", "token", values.tokens[at]),
		row("position", "position", `${number(at + 1)} of ${number(values.tokens.length)}`),
		row(cut, "cut", CUTS[values.cut[at]]),
		Object.entries(numbers).map(([name, title]) => row(title, name, exact(values[name][at]), probability(name))));
}
