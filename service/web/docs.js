// Draws /openapi.json: under each tag a row for each route, its body's fields, and its answers. Everything is text, nothing is markup.

const METHODS = ["get", "post", "put", "delete"];

function node(tag, text = "", ...children) {
  const made = document.createElement(tag);
  made.textContent = text;
  made.append(...children);
  return made;
}

// The schema that a $ref names; others as they are.
function resolved(api, schema) {
  const path = schema?.$ref?.replace("#/", "").split("/") ?? [];
  return path.length ? path.reduce((value, key) => value?.[key], api) ?? {} : schema ?? {};
}

function typeOf(api, schema) {
  if (!schema || typeof schema !== "object") return "anything";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.map((choice) => typeOf(api, choice)).join(" or ");
  const types = [schema.type ?? "anything"].flat();
  return types.map((type) => (type === "array" ? `list of ${typeOf(api, schema.items)}` : type)).join(" or ");
}

function limitsOf(schema) {
  const limits = [];
  if (schema.minimum !== undefined) limits.push(`at least ${schema.minimum}`);
  if (schema.maximum !== undefined) limits.push(`at most ${schema.maximum}`);
  if (schema.default !== undefined && schema.default !== null) limits.push(`default ${JSON.stringify(schema.default)}`);
  if (schema.examples?.length) limits.push(`example ${JSON.stringify(schema.examples[0])}`);
  return limits.join(", ");
}

function about(field) {
  const made = node("td", field.description ?? "");
  const limits = limitsOf(field);
  if (limits) {
    const note = node("div", limits);
    note.className = "note";
    made.append(note);
  }
  return made;
}

function fieldRows(api, schema) {
  const required = new Set(schema.required ?? []);
  return Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const label = node("td", name);
    if (required.has(name)) {
      const mark = node("span", " *");
      mark.className = "need";
      mark.title = "required";
      label.append(mark);
    }
    return node("tr", "", label, node("td", typeOf(api, field)), about(field));
  });
}

function bodyOf(api, operation) {
  return resolved(api, operation.requestBody?.content?.["application/json"]?.schema);
}

function answerRows(operation) {
  return Object.entries(operation.responses ?? {}).map(([status, answer]) => {
    const kinds = Object.keys(answer.content ?? {}).join(", ");
    return node("tr", "", node("td", status), node("td", answer.description ?? ""), node("td", kinds));
  });
}

function route(api, path, method, operation) {
  const summary = node("summary", "", node("b", method.toUpperCase()), node("code", path));
  const note = node("span", operation.summary ?? "");
  note.className = "note";
  summary.append(note);
  if (operation.security) {
    const key = node("span", "key");
    key.className = "pill";
    key.title = "needs a key where the server has keys";
    summary.append(" ", key);
  }
  const made = node("details", "", summary);
  const schema = bodyOf(api, operation);
  const fields = Object.keys(schema.properties ?? {});
  made.dataset.words = [path, operation.summary ?? "", ...fields].join(" ").toLowerCase();
  made.addEventListener("toggle", () => {
    if (made.open && made.children.length === 1) {
      if (operation.description) made.append(node("p", operation.description));
      made.append(node("table", "", ...fieldRows(api, schema)), node("table", "", ...answerRows(operation)));
    }
  });
  return made;
}

function filter() {
  const word = document.getElementById("filter").value.trim().toLowerCase();
  for (const made of document.querySelectorAll("details")) made.hidden = !made.dataset.words.includes(word);
  for (const part of document.querySelectorAll("#routes section")) part.hidden = !part.querySelector("details:not([hidden])");
}

// The routes of each tag, in the order of the document.
function sections(api, routes) {
  const tags = [...(api.tags ?? []), { name: "", description: "" }];
  return tags.map((tag) => {
    const own = routes.filter(({ operation }) => (operation.tags?.[0] ?? "") === tag.name);
    const rows = own.map(({ path, method, operation }) => route(api, path, method, operation));
    return rows.length ? [node("section", "", node("h2", tag.name), node("p", tag.description), ...rows)] : [];
  }).flat();
}

async function show() {
  const summary = document.getElementById("summary");
  const answer = await fetch("/openapi.json");
  if (!answer.ok) throw new Error(`/openapi.json answers ${answer.status}`);
  const api = await answer.json();
  const routes = Object.entries(api.paths).flatMap(([path, methods]) =>
    METHODS.filter((method) => methods[method]).map((method) => ({ path, method, operation: methods[method] })));
  document.getElementById("routes").replaceChildren(...sections(api, routes));
  summary.textContent = `${api.info.title} ${api.info.version}: ${routes.length} routes`;
}

document.getElementById("filter").addEventListener("input", filter);
show().catch((error) => {
  const summary = document.getElementById("summary");
  summary.textContent = String(error.message);
  summary.classList.add("bad");
});
