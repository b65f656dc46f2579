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

// Replace the children of an element.
export function fill(element, ...children) {
	element.replaceChildren(...nodes(children));
	return element;
}

function nodes(children) {
	return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false && child !== "");
}
