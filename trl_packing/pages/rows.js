// Draws packed rows as strips, one of them as tokens, its attention mask, and its later companions.
// Text of documents is written by textContent alone.

const SVG = "http://www.w3.org/2000/svg";
const HUES = 6;
const IGNORED = -100;
const count = (n) => n.toLocaleString("en-US");
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "g", "rect", "path", "polygon", "title", "pattern", "defs"].includes(tag);
  const made = isSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const shade = (row, k) => (row.documents[k].number === null ? "pad" : `of${k % HUES}`);
const widest = Math.max(data.capacity ?? 0, ...data.rows.map((row) => row.stop - row.start));
const heaviest = Math.max(0, ...data.rows.flatMap((row) => row.weights ?? [1]));

// Weight of a token in the loss, 0 if it is not trained.
function weightOf(row, i) {
  if (row.labels[i] === IGNORED) return 0;
  return row.weights === null ? 1 : row.weights[i];
}

function documentOf(row, i) {
  return row.documents.findIndex((d) => row.start + i < d.stop);
}

// --- strips ---------------------------------------------------------------------------------------

// Draws the runs of tokens of one document that have the same weight.
function drawDocument(row, k, hatch) {
  const { start, stop, number } = row.documents[k];
  const group = element("g", { class: shade(row, k) });
  const end = Math.min(stop - row.start, row.ids.length);
  for (let i = start - row.start; i < end; ) {
    const weight = weightOf(row, i);
    let next = i + 1;
    while (next < end && weightOf(row, next) === weight) next++;
    const run = element("rect", { x: i, y: 0, width: next - i, height: 1 });
    run.setAttribute("class", weight > 0 ? "target" : "prompt");
    if (weight > 0) run.style.setProperty("--weight", weight / heaviest);
    if (number === null) run.style.fill = `url(#${hatch})`;
    group.append(run);
    i = next;
  }
  if (end < stop - row.start) {
    const rest = { x: Math.max(end, start - row.start), y: 0, height: 1, class: "other" };
    group.append(element("rect", { ...rest, width: stop - row.start - rest.x }));
  }
  return group;
}

function boundary(x) {
  return element("path", { d: `M${x} 0V1`, class: "boundary" });
}

function strip(row, index) {
  const picture = element("svg", { viewBox: `0 0 ${widest} 1`, preserveAspectRatio: "none" });
  const hatch = `hatch${index}`;
  picture.append(hatching(hatch));
  row.documents.forEach((d, k) => {
    const group = drawDocument(row, k, hatch);
    group.dataset.properties = d.properties.join("|");
    picture.append(group);
    if (d.stop < row.stop) picture.append(boundary(d.stop - row.start));
  });
  const name = element("span", { class: "name" }, row.short);
  const button = element("button", { class: "strip", type: "button", "data-row": index });
  button.classList.toggle("first", row.start === 0 && data.rows.some((r) => r.start > 0));
  button.setAttribute("aria-label", `${row.name}: ${summary(row)}`);
  button.append(name, picture);
  button.addEventListener("click", () => select(index));
  const at = (event) => {
    const box = picture.getBoundingClientRect();
    const i = Math.floor(((event.clientX - box.left) / box.width) * widest);
    const inside = event.clientX >= box.left && i < row.ids.length;
    return inside ? showTip(row, i, event.clientX, box.bottom) : hideTip();
  };
  button.addEventListener("pointermove", at);
  button.addEventListener("pointerleave", hideTip);
  return button;
}

function hatching(id) {
  const size = { id, width: widest / 120, height: 1, patternUnits: "userSpaceOnUse" };
  const half = { x: 0, y: 0, width: size.width / 2, height: 1, fill: "var(--soft)" };
  const back = { ...half, width: size.width, fill: "var(--line)" };
  const pattern = element("pattern", size, element("rect", back), element("rect", half));
  return element("defs", {}, pattern);
}

function summary(row) {
  const tokens = row.stop - row.start;
  const real = row.documents.filter((d) => d.number !== null);
  const padding = row.documents.reduce((n, d) => n + (d.number === null) * (d.stop - d.start), 0);
  const trained = real.reduce((n, d) => n + d.trained, 0);
  return [
    `${count(real.length)} document${real.length === 1 ? "" : "s"}`,
    `${count(tokens)}${data.capacity ? ` of ${count(data.capacity)}` : ""} tokens`,
    `${count(trained)} trained`,
    ...(padding ? [`${count(padding)} padding`] : []),
    ...(row.reason ? [row.reason] : []),
  ].join(" · ");
}

// --- one row --------------------------------------------------------------------------------------

let selected = 0;

function select(index) {
  selected = index;
  for (const button of document.querySelectorAll(".strip")) {
    button.setAttribute("aria-current", String(Number(button.dataset.row) === index));
  }
  const row = data.rows[index];
  byId("row-name").textContent = row.name;
  byId("row-summary").textContent = summary(row);
  byId("documents").replaceChildren(...row.documents.map((_, k) => documentText(row, k)));
  drawMask(row);
  drawLater(row);
}

function documentText(row, k) {
  const d = row.documents[k];
  const heading = element("h3");
  heading.append(d.number === null ? "padding" : `document ${count(d.number)} `);
  const facts = d.number === null ? [] : [`row ${count(d.row)} of the data`];
  facts.push(`${count(d.stop - d.start)} tokens`, `${count(d.trained)} trained`);
  if (d.ending !== null) facts.push(`ends in ${d.ending}`);
  heading.append(element("span", { class: "note" }, ` · ${facts.join(" · ")}`));
  for (const property of d.properties) {
    const more = property === "cut" ? ` from ${count(d.uncut)} tokens` : "";
    heading.append(element("span", { class: `mark ${property.replaceAll(" ", "-")}` }, ` · ${property}${more}`));
  }
  const text = element("div", { class: "tokens" });
  const end = Math.min(d.stop - row.start, row.ids.length);
  for (let i = d.start - row.start; i < end; i++) text.append(token(row, i));
  if (end < d.stop - row.start) {
    const left = d.stop - row.start - Math.max(end, d.start - row.start);
    text.append(element("span", { class: "note" }, ` … ${count(left)} more tokens`));
  }
  return element("div", { class: `document ${shade(row, k)}` }, heading, text);
}

function token(row, i) {
  const weight = weightOf(row, i);
  const text = data.texts[row.texts[i]];
  const shown = element("span", { class: "token", "data-token": i, tabindex: i ? -1 : 0 });
  shown.textContent = text === "" ? "·" : text.replaceAll("\n", "⏎\n");
  shown.classList.toggle("silent", text === "");
  if (weight > 0) {
    shown.classList.add("target");
    shown.style.setProperty("--weight", weight / heaviest);
    shown.classList.toggle("weighted", weight !== 1);
  }
  return shown;
}

// --- the mask -------------------------------------------------------------------------------------

function drawMask(row) {
  const size = row.stop - row.start;
  const picture = element("svg", { viewBox: `0 0 ${size} ${size}`, role: "img" });
  picture.setAttribute("aria-label", "attention mask: one triangle for each document");
  row.documents.forEach((d, k) => {
    const [a, b] = [d.start - row.start, d.stop - row.start];
    const triangle = element("polygon", { points: `${a},${a} ${a},${b} ${b},${b}` });
    triangle.setAttribute("class", `${shade(row, k)} target`);
    picture.append(triangle);
  });
  picture.append(element("path", { id: "sees", class: "sees", d: "" }));
  const of = `tokens ${count(row.start)} to ${count(row.stop)} of the micro-batch`;
  const cut = row.documents.map((d) => count(d.start)).concat(count(row.stop));
  const shown = cut.length > 12 ? [...cut.slice(0, 11), "…", cut.at(-1)] : cut;
  byId("mask").replaceChildren(
    picture,
    element("p", { class: "note" }, `Rows are queries, columns keys: ${of}. ` +
      "A token sees the tokens before it in its document, and nothing else."),
    element("p", {}, `cu_seqlens: ${shown.join(" ")}`),
  );
}

function markMask(row, i) {
  const line = byId("sees");
  if (!line || row !== data.rows[selected]) return;
  const { start, stop } = row.documents[documentOf(row, i)];
  line.setAttribute("d", `M${start - row.start} ${i + 0.5}H${i + 0.5}V${stop - row.start}`);
}

// --- one token ------------------------------------------------------------------------------------

function facts(row, i) {
  const d = row.documents[documentOf(row, i)];
  const [id, label] = [row.ids[i], row.labels[i]];
  const text = data.texts[row.texts[i]];
  const isFirst = row.start + i === d.start;
  const untrained = isFirst ? "first of its document, never a target" : "not trained";
  const target = label === id ? "the id, trained" : "trained";
  return [
    ["text", text === "" ? "a part of the next character" : JSON.stringify(text)],
    ["id", id],
    ["position", count(row.positions[i])],
    ["label", `${label} (${label === IGNORED ? untrained : target})`],
    ["weight", String(weightOf(row, i))],
    ["document", d.number === null ? "padding" : `${count(d.number)}, row ${count(d.row)} of the data`],
    ["boundary", `tokens ${count(d.start)} to ${count(d.stop)}; this is ${count(row.start + i)}`],
  ];
}

function showTip(row, i, x, y) {
  const list = element("dl");
  for (const [name, value] of facts(row, i)) {
    list.append(element("dt", {}, name), element("dd", {}, String(value)));
  }
  const tip = byId("tip");
  tip.replaceChildren(list);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const below = y + 8 + height < window.innerHeight;
  tip.style.left = `${Math.max(8, Math.min(x, window.innerWidth - width - 8))}px`;
  tip.style.top = `${below ? y + 8 : Math.max(8, y - height - 36)}px`;
  markMask(row, i);
}

function hideTip() {
  byId("tip").hidden = true;
  byId("sees")?.setAttribute("d", "");
  document.querySelector(".token.here")?.classList.remove("here");
}

function point(shown) {
  hideTip();
  if (!shown) return;
  const { left, bottom } = shown.getBoundingClientRect();
  shown.classList.add("here");
  showTip(data.rows[selected], Number(shown.dataset.token), left, bottom);
}

// --- epochs ---------------------------------------------------------------------------------------

function drawLater(row) {
  const list = [];
  const hues = new Map(row.documents.map((d, k) => [d.number, shade(row, k)]));
  const line = (name, documents) => {
    const picture = element("svg", { viewBox: `0 0 ${widest} 1`, preserveAspectRatio: "none" });
    let x = 0;
    for (const [number, length] of documents) {
      const hue = hues.get(number);
      const box = { x, y: 0, width: length, height: 1, class: hue ? `${hue} target` : "other" };
      const title = element("title");
      title.textContent = `document ${count(number)}, ${count(length)} tokens`;
      picture.append(element("rect", box, title), boundary((x += length)));
    }
    list.push(element("span", { class: "name" }, name), picture);
  };
  const real = row.documents.filter((d) => d.number !== null);
  line("epoch 1, this row", real.map((d) => [d.number, d.stop - d.start]));
  for (const { name, documents } of row.later) line(`epoch 2, ${name}`, documents);
  byId("later").replaceChildren(...list);
}

// --- the page -------------------------------------------------------------------------------------

function filter(property, pressed) {
  for (const button of byId("filters").children) {
    button.setAttribute("aria-pressed", String(button === pressed));
  }
  const shown = [];
  document.querySelectorAll(".strip").forEach((button, index) => {
    const holds = (d) => d.properties.includes(property);
    button.hidden = property !== "" && !data.rows[index].documents.some(holds);
    button.style.display = button.hidden ? "none" : "";
    if (!button.hidden) shown.push(index);
    for (const group of button.querySelectorAll("g")) {
      const has = group.dataset.properties.split("|").includes(property);
      group.classList.toggle("dim", property !== "" && !has);
    }
  });
  if (!shown.includes(selected)) select(shown[0]);
}

function addFilters() {
  const choices = [["", "all rows", data.rows.length]];
  for (const property of data.properties) {
    const holds = (row) => row.documents.some((d) => d.properties.includes(property));
    choices.push([property, property, data.rows.filter(holds).length]);
  }
  for (const [property, name, number] of choices) {
    const button = element("button", { type: "button", "aria-pressed": property === "" });
    button.textContent = `${name} (${count(number)})`;
    button.disabled = number === 0;
    button.addEventListener("click", () => filter(property, button));
    byId("filters").append(button);
  }
}

addFilters();
byId("strips").append(...data.rows.map(strip));
select(0);

const texts = byId("documents");
const tokenAt = (event) => event.target.closest?.(".token");
texts.addEventListener("pointerover", (event) => point(tokenAt(event)));
texts.addEventListener("pointerleave", hideTip);
texts.addEventListener("click", (event) => tokenAt(event)?.focus({ preventScroll: true }));
texts.addEventListener("focusin", (event) => point(tokenAt(event)));
texts.addEventListener("focusout", hideTip);
texts.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const all = [...texts.querySelectorAll(".token")];
  const next = all[all.indexOf(document.activeElement) + step];
  if (!step || !next) return;
  event.preventDefault();
  document.activeElement.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
