// Creation of elements. Strings become text nodes, so that no text of a model is ever interpreted as markup.

// h("p.muted", {onclick: f, style: {width: "4px"}}, "text", [more], null): attributes are optional; null, false, "" are skipped.
export function h(tag, attributes, ...children) {
	const [type, ...classes] = tag.split(".");
	const element = document.createElement(type);
	const given = attributes?.constructor === Object;
	if (classes.length) element.className = classes.join(" ");
	for (const [name, value] of Object.entries(given ? attributes : {})) {
		if (value === null || value === undefined || value === false) continue;
		if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
		else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
		else if (["value", "checked", "disabled", "selected", "open", "tabIndex"].includes(name)) element[name] = value;
		else element.setAttribute(name, value === true ? "" : value);
	}
	element.append(...nodes(given ? children : [attributes, children]));
	return element;
}

export const problem = (message) => h("p.error", { role: "alert" }, message);

// A command with a button that copies it, or selects it where the browser does not copy.
export function command(text) {
	const code = h("code", text);
	const button = h("button.button.small", { onclick: async () => {
		getSelection().selectAllChildren(code);
		await navigator.clipboard?.writeText(text).then(() => { button.textContent = "Copied"; }, () => {});
	} }, "Copy");
	return h("span.command", code, button);
}

export const rowHead = (...children) => h("th", { scope: "row" }, children);

// A field whose text filters what `name` names.
export const filterField = (name, oninput) =>
	h("input", { type: "search", placeholder: `filter the ${name}`, "aria-label": `Filter of the ${name}`, oninput });

// A function that calls `act` once after `ms`, however often it is called until then; `cancel` prevents this.
export function later(ms, act) {
	let timer = null;
	const run = () => {
		timer = null;
		act();
	};
	return Object.assign(() => { timer ??= setTimeout(run, ms); }, { cancel: () => clearTimeout(timer) });
}

// Replace the children of an element.
export function fill(element, ...children) {
	element.replaceChildren(...nodes(children));
	return element;
}

function nodes(children) {
	return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false && child !== "");
}
