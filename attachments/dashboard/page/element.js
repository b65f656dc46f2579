// Creation of elements. Strings become text nodes, so that no text of a model is ever interpreted as markup.

const PROPERTIES = ["value", "checked", "disabled", "selected", "open", "tabIndex"];

/** h("p.muted", {onclick: f, style: {width: "4px"}}, "text", [more], null): attributes are optional; null, false and
 * "" are skipped. @param {string} tag @param {any} [attributes] @param {any[]} children @returns {any} */
export function h(tag, attributes, ...children) {
	const [type, ...classes] = tag.split(".");
	const element = document.createElement(type);
	const given = attributes?.constructor === Object;
	if (classes.length) element.className = classes.join(" ");
	for (const [name, value] of Object.entries(given ? attributes : {})) {
		if (value === null || value === undefined || value === false) continue;
		if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
		else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
		else if (PROPERTIES.includes(name)) Object.assign(element, { [name]: value });
		else element.setAttribute(name, value === true ? "" : value);
	}
	element.append(...nodes(given ? children : [attributes, children]));
	return element;
}

/** @param {string} message */
export const problem = (message) => h("p.error", { role: "alert" }, message);

/** A command with a button that copies it, or selects it where the browser does not copy. @param {string} text */
export function command(text) {
	const code = h("code", text);
	const button = h("button.button.small", { onclick: async () => {
		getSelection().selectAllChildren(code);
		await navigator.clipboard?.writeText(code.textContent).then(() => { button.textContent = "Copied"; }, () => {});
	} }, "Copy");
	return h("span.command", code, button);
}

/** @param {any[]} children */
export const rowHead = (...children) => h("th", { scope: "row" }, children);

/** A field whose text filters what `name` names. @param {string} name @param {() => void} oninput */
export const filterField = (name, oninput) =>
	h("input", { type: "search", placeholder: `filter the ${name}`, "aria-label": `Filter of the ${name}`, oninput });

/** A function that calls `act` once after `ms`, however often it is called until then; `cancel` prevents this.
 * @param {number} ms @param {() => void} act */
export function later(ms, act) {
	let timer = /** @type {number | null} */ (null);
	const run = () => {
		timer = null;
		act();
	};
	return Object.assign(() => { timer ??= setTimeout(run, ms); }, { cancel: () => clearTimeout(timer) });
}

/** Replace the children of an element. @param {Element} element @param {any[]} children */
export function fill(element, ...children) {
	element.replaceChildren(...nodes(children));
	return element;
}

/** Give an element these children, and keep those that do not differ: selection, focus and tooltips stay. Listeners
 * of children must not depend on what changes. @param {Element} element @param {any[]} children */
export function update(element, ...children) {
	const wanted = nodes(children).map((child) => (child instanceof Node ? child : new Text(child)));
	wanted.forEach((next, at) => {
		if (element.childNodes[at]) patch(element.childNodes[at], next);
		else element.append(next);
	});
	while (element.childNodes.length > wanted.length) element.lastChild.remove();
}

/** Make a node equal to another one. @param {any} old @param {any} next */
export function patch(old, next) {
	if (old.isEqualNode(next)) return;
	if (old.nodeName !== next.nodeName || old.dataset?.key !== next.dataset?.key) old.replaceWith(next);
	else if (old instanceof Text) old.data = next.data;
	else {
		const gone = [...old.attributes].filter(({ name }) => name !== "open" && !next.hasAttribute(name));
		for (const { name } of gone) old.removeAttribute(name);
		for (const { name, value } of next.attributes) if (name !== "style") old.setAttribute(name, value);
		for (const name of next.style) old.style.setProperty(name, next.style.getPropertyValue(name));
		update(old, ...next.childNodes);
	}
}

/** @param {any[]} children @returns {(Node | string)[]} */
function nodes(children) {
	const shown = children.flat(Infinity).filter((child) => ![null, undefined, false, ""].includes(child));
	return shown.map((child) => (child instanceof Node ? child : String(child)));
}
