// Asks for /cache/data again and again, and shows it. All of it goes in as text, none as markup.
"use strict";

const BUSY_MS = 1000, IDLE_MS = 3000, HIDDEN_MS = 10000;
const HERE = location.origin + location.pathname; // without a password that was part of the address
const INDENT = 14, DEEPEST = 10;
const at = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const drawn = {};
let timer = null;
let asked = 0;

function made(name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return `${n >= 100 || unit === 0 ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

function tokens(n) { return `${number.format(n)} token${n === 1 ? "" : "s"}`; }

function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

function bar(parts, whole) {
  const made_ = made("div", "bar");
  for (const [className, n] of parts) {
    const part = made("span", className);
    part.style.width = `${whole > 0 ? 100 * n / whole : 0}%`;
    made_.append(part);
  }
  return made_;
}

function line(...parts) {
  const made_ = made("div", "line");
  for (const part of parts) if (part) made_.append(typeof part === "string" ? made("span", "", part) : part);
  return made_;
}

function tenant(name) { return name ? made("span", "soft", name === "you" ? "yours" : `tenant ${name}`) : null; }

const TIERS = { ram: "RAM", disk: "Disk", remote: "Remote store" };

function tiers(told) {
  const rows = Object.entries(told).map(([name, tier]) => {
    const row = made("div");
    const rest = [];
    if (tier.waiting) rest.push(`${tier.waiting} waiting to be written`);
    row.append(line(`${TIERS[name]}: ${bytes(tier.bytes)} of ${bytes(tier.budget)}`,
      rest.length ? made("span", "soft", rest.join(", ")) : null));
    row.append(bar([[name, tier.bytes]], Math.max(tier.budget, tier.bytes)));
    return row;
  });
  return rows.length ? rows : [made("span", "soft", "nothing is kept")];
}

function slot(told) {
  const row = made("div");
  const prompt = told.n_prompt_tokens, cached = told.n_prompt_tokens_cache, read = told.n_prompt_tokens_processed;
  const said = prompt === undefined ? 0 : told.next_token[0].n_decoded;
  const state = !told.is_processing ? "idle" : told.n_past === undefined ? "in use by another tenant"
    : prompt === undefined ? "begins" : cached + read < prompt ? "reads its prompt" : "answers";
  const parts = [`${told.id}: ${state}`];
  if (prompt !== undefined) {
    parts.push(`prompt ${tokens(prompt)}, ${number.format(cached)} cached`);
    if (said) parts.push(`answer ${tokens(said)}`);
  } else if (told.n_past) {
    parts.push(made("span", "soft", `${tokens(told.n_past)} live`));
  }
  row.append(line(...parts, tenant(told.tenant)));
  if (prompt !== undefined) {
    row.append(bar([["cached", cached], ["decoded", read], ["said", said]], prompt + said));
  }
  return row;
}

function branches(tree) {
  const depths = [];
  const rows = tree.branches.map((told) => {
    const depth = told.parent < 0 ? 0 : depths[told.parent] + 1;
    depths.push(depth);
    const row = made("li");
    row.style.paddingLeft = `${INDENT * Math.min(depth, DEEPEST)}px`;
    const span = made("span");
    const where = [];
    if (told.slots.length) where.push("live");
    if (told.ram.nbytes) where.push("ram");
    if (told.disk.nbytes) where.push("disk");
    for (const each of where.length ? where : ["bare"]) span.append(made("i", `tip ${each}`));
    const places = `${number.format(told.start)}–${number.format(told.end)}`;
    span.append(` ${depth > DEEPEST ? `(depth ${depth}) ` : ""}${places}`);
    const parts = [span];
    if (told.slots.length) parts.push(`slot ${told.slots.join(", ")}`);
    for (const [name, kept] of [["RAM", told.ram], ["disk", told.disk]]) {
      if (!kept.nbytes && !kept.checkpoints) continue;
      const what = `${name}: ${kept.checkpoints} checkpoint${kept.checkpoints === 1 ? "" : "s"}, ${bytes(kept.nbytes)}`;
      parts.push(made("span", "soft", kept.pinned ? `${what}, ${kept.pinned} pinned` : what));
    }
    if (told.next.length) {
      const names = told.next.map((name) => (name === "ram" ? "RAM" : "disk")).join(" and ");
      parts.push(made("span", "goes", `goes next from ${names}`));
    }
    if (told.idle !== null) {
      parts.push(made("span", "soft", told.idle ? `${number.format(told.idle)} request${told.idle === 1 ? "" : "s"} ago` : "last request"));
    }
    if (told.parent < 0) parts.push(made("span", "soft", `model ${told.model}`), tenant(told.tenant));
    if (told.more) parts.push(made("span", "soft", `${number.format(told.more)} more go on from here`));
    row.append(line(...parts));
    if (told.text !== undefined) row.append(made("div", "text", told.text));
    return row;
  });
  if (tree.more) rows.push(made("li", "soft", `${number.format(tree.more)} more conversations`));
  return rows.length ? rows : [made("li", "soft", "none")];
}

function requests(told) {
  const longest = Math.max(1, ...told.map((each) => each.prompt + each.generated));
  const rows = told.map((each) => {
    const row = made("li");
    const parts = [`${tokens(each.prompt)}: ${number.format(each.cached)} cached,`
      + ` ${number.format(each.prompt - each.cached)} decoded, answer ${number.format(each.generated)}`];
    if (each.end !== "done") parts.push(made("span", "goes", each.end));
    parts.push(made("span", "soft", `first token after ${(each.waited + each.first_token_seconds).toFixed(2)} s`));
    parts.push(tenant(each.tenant), made("span", "soft", ago(Date.now() / 1000 - each.ended)));
    row.append(line(...parts));
    row.append(bar([["cached", each.cached], ["decoded", each.prompt - each.cached], ["said", each.generated]],
      longest));
    if (each.reason) row.append(made("div", "soft", each.reason));
    return row;
  });
  return rows.length ? rows : [made("li", "soft", "none yet")];
}

function draw(id, told, rows) { // what did not change stays as it is, with where it was scrolled to
  const text = JSON.stringify(told);
  if (drawn[id] === text) return;
  drawn[id] = text;
  at(id).replaceChildren(...rows(told));
}

function show(told) {
  at("model").textContent = told.model || "no model is open";
  at("ask").hidden = !told.text.allowed;
  draw("tiers", told.tiers, tiers);
  draw("slots", told.slots, (slots) => slots.map(slot));
  draw("tree", told.tree, branches);
  at("requests").replaceChildren(...requests(told.requests));
  at("state").className = "";
  at("state").textContent = told.waiting ? `${told.waiting} waiting` : "";
}

async function look() {
  clearTimeout(timer);
  const mine = asked += 1;
  let wait = IDLE_MS;
  try {
    const response = await fetch(`${HERE}/data?text=${at("text").checked}`, { cache: "no-store" });
    if (!response.ok) throw new Error(`the server says ${response.status}`);
    const told = await response.json();
    if (mine !== asked) return; // another one was asked meanwhile
    show(told);
    if (told.slots.some((each) => each.is_processing)) wait = BUSY_MS;
  } catch (error) {
    if (mine !== asked) return;
    at("state").className = "lost";
    at("state").textContent = `not up to date: ${error.message}`;
  }
  timer = setTimeout(look, document.hidden ? HIDDEN_MS : wait);
}

at("text").checked = location.hash === "#text"; // so that it can be asked for in the address
at("text").addEventListener("change", look);
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
look();
