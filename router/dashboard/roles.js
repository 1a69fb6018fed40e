// What --auto-roles makes of the load: how much each pool bears, what it decided and why, the last moves. Owns its section.

import { el, nameOf, put, said, time } from "/web/show.js";

const SHOWN_MOVES = 5, FULL = 2; // a bar is as long as twice what a pool can bear
const ROLES = ["prefill", "decode"];

/** One pool: its name, its pressure, a bar with a mark where the pool counts as short. */
class Pool {
  constructor(role) {
    this.figure = el("b");
    this.bar = el("span", "bar");
    this.mark = el("span", "limit");
    this.note = el("span", "note");
    this.node = el("p", `pool ${role}`, el("span", "name", role), this.figure, el("span", "track", this.bar, this.mark), this.note);
  }

  update(pressure, shortFor, enter) {
    const known = pressure !== undefined;
    put(this.figure, known ? pressure.toFixed(2) : "–");
    this.bar.style.width = `${Math.min(1, (pressure ?? 0) / FULL) * 100}%`;
    this.mark.style.left = `${Math.min(1, enter / FULL) * 100}%`;
    put(this.note, shortFor === undefined ? "" : `short for ${said(time(shortFor))}`);
  }
}

class Model {
  constructor(name) {
    this.title = el("h3", "", name || "workers that name no model");
    this.pools = Object.fromEntries(ROLES.map((role) => [role, new Pool(role)]));
    this.verdict = el("p", "note verdict");
    this.node = el("div", "model", this.title, ...ROLES.map((role) => this.pools[role].node), this.verdict);
  }

  update(told, enter, alone) {
    this.title.hidden = alone;
    for (const role of ROLES) this.pools[role].update(told.pressure[role], told.short_for_s[role], enter);
    put(this.verdict, told.verdict);
  }
}

function moveRow(move, now_s) {
  const ended = move.result !== null;
  const took = ended ? `${move.result} after ${said(time(move.seconds))}` : `for ${said(time(now_s - move.began_s))}`;
  const row = el("li", ended && move.result !== "moved" ? "move bad" : "move",
    el("span", "name", `${nameOf(move.url)} → ${move.to_role}`), el("span", "took", took),
    el("span", "when", ended ? `${said(time(now_s - move.began_s))} ago` : "now"), el("span", "note", move.reason));
  row.dataset.url = move.url;
  row.dataset.result = move.result ?? "";
  return row;
}

class Roles {
  constructor(section) {
    this.section = section;
    this.box = section.querySelector(".models");
    this.list = section.querySelector(".moves");
    this.models = new Map();
  }

  update({ auto_roles: told }) {
    this.section.hidden = !told;
    if (!told) return;
    const names = Object.keys(told.models).sort();
    if (JSON.stringify(names) !== JSON.stringify([...this.models.keys()])) { // "" is a name, too: workers that do not say
      this.models = new Map(names.map((name) => [name, this.models.get(name) ?? new Model(name)]));
      this.box.replaceChildren(...[...this.models.values()].map((model) => model.node));
    }
    for (const [name, model] of this.models) model.update(told.models[name], told.enter, names.length === 1);
    const shown = told.moves.slice(0, SHOWN_MOVES);
    this.list.replaceChildren(...shown.map((move) => moveRow(move, told.now_s)));
    if (!shown.length) this.list.append(el("li", "note", "no worker was moved yet"));
  }
}

/** The answer is told every new state. */
export function makeRoles(section) {
  const roles = new Roles(section);
  return (state) => roles.update(state);
}
