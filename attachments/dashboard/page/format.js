// Numbers as text. A missing value is a dash, never 0.

export const MISSING = "–";

/** @param {any} value */
export function missing(value) {
	return value === null || value === undefined || Number.isNaN(value);
}

/** 12,345 · 0.0362 · 7.6e-14 @param {any} value */
export function number(value, digits = 3) {
	if (missing(value)) return MISSING;
	if (typeof value !== "number") return String(value);
	const size = Math.abs(value);
	if (size === Infinity) return value > 0 ? "∞" : "−∞";
	if (size >= 1e9 || (size > 0 && size < 1e-3)) return value.toExponential(digits - 1).replace("e+", "e");
	if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en-US");
	return String(Number(value.toPrecision(digits)));
}

/** @param {any} value */
export function percent(value) {
	return missing(value) ? MISSING : `${number(100 * value)}\u00a0%`;
}

/** 0.18 s · 52 s · 2 min 10 s · 1 h 5 min · 2 d 3 h @param {any} seconds */
export function duration(seconds) {
	if (missing(seconds)) return MISSING;
	if (seconds < 1e-3) return seconds ? `${number(seconds * 1e6)}\u00a0µs` : "0 s";
	if (seconds < 1) return `${number(seconds * 1e3)}\u00a0ms`;
	if (seconds < 9.95) return `${number(seconds, 2)}\u00a0s`;
	const whole = Math.round(seconds);
	/** @type {[number, string, number, string][]} */
	const units = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];
	for (const [large, name, small, rest] of units) {
		if (whole < large) continue;
		const remainder = Math.floor((whole % large) / small);
		return `${Math.floor(whole / large)}\u00a0${name}${remainder ? `\u00a0${remainder}\u00a0${rest}` : ""}`;
	}
	return `${whole}\u00a0s`;
}

/** 126 MiB, as in the terminal @param {any} value */
export function bytes(value) {
	if (missing(value)) return MISSING;
	let unit = 0;
	while (Math.abs(value) >= 1024 && unit < 4) [value, unit] = [value / 1024, unit + 1];
	return `${number(value)}\u00a0${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}
