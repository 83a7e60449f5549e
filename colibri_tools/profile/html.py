"""A profile as one self-contained HTML page: heat map with hover, coverage and cache curves.

Nothing is loaded from elsewhere; the numbers are a JSON document inside the page, drawn by the
script in it. Names from the profile get into the page as JSON text only.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from colibri_tools.profile.file import RoutingProfile
from colibri_tools.profile.replay import lru_curve, replay, requests_of
from colibri_tools.profile.report import ProfileReport
from colibri_tools.profile.stats import coverage_curve

__all__ = ["html_page"]

_CURVE_POINTS = 100
_MAX_TRACE_TOKENS = 2000
"""Of a long trace, the first tokens are replayed: curves settle long before."""


def html_page(profile: RoutingProfile) -> str:
    """Return the page's text."""
    data = {
        "title": f"{profile.family}: {profile.n_rows} MoE layers x {profile.max_experts} experts",
        "report": ProfileReport(profile).to_json(),
        "curves": _curves(profile),
        "caches": _caches(profile),
    }
    # "</" would end the script element wherever it stands.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    return _PAGE.replace("@DATA@", text)


def _curves(profile: RoutingProfile) -> list[dict[str, Any]]:
    mask, whole = profile.mask(), profile.counts()
    curves = [_curve("all text, in sample", coverage_curve(whole, mask))]
    for d, name in enumerate(profile.domains):
        own = profile.counts(domain=d)
        if len(profile.domains) > 1 and own.any() and (whole - own).any():
            held = coverage_curve(own, mask, whole - own)
            curves.append(_curve(f"{name}, by the rest", held))
    return curves


def _curve(name: str, values: Any) -> dict[str, Any]:
    x = np.linspace(0, len(values) - 1, _CURVE_POINTS + 1)
    points = np.interp(x, np.arange(len(values)), values)
    return {"name": name, "y": [round(float(v), 5) for v in points]}


def _caches(profile: RoutingProfile) -> list[dict[str, Any]]:
    if profile.trace is None or not len(profile.trace.experts):
        return []
    requests = requests_of(profile.trace.experts[:_MAX_TRACE_TOKENS], profile.n_experts)
    n_blocks = sum(profile.n_experts)
    counts = profile.counts()[profile.mask()]
    curves = [_curve("LRU", lru_curve(requests, n_blocks))]
    steps = np.linspace(0, n_blocks, 21).round().astype(int)
    for name, policy in (("static hottest", "static"), ("Belady's optimum", "belady")):
        rates = [replay(policy, requests, int(n), counts) for n in steps]
        curves.append({"name": name, "y": [round(rate, 5) for rate in rates]})
    return curves


_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Routing profile</title>
<style>
:root { color-scheme: light dark; --line: #8886; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem .15rem 0; text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 1px solid var(--line); font-weight: 600; }
canvas { image-rendering: pixelated; width: 100%; display: block; border: 1px solid var(--line); }
.map { position: relative; margin: 0 0 1.6rem 2.4rem; }
.map span { position: absolute; font-size: 11px; line-height: 1; opacity: .7; }
.map .layer { right: 100%; margin-right: .4rem; transform: translateY(-50%); }
.map .expert { top: 100%; margin-top: .3rem; transform: translateX(-50%); }
.scroll { max-height: 24rem; overflow: auto; } .dim { opacity: .7; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1.5rem; }
.plots > div { max-width: 38rem; } table + table { margin-top: 1rem; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: currentColor; }
#where { min-height: 1.6em; font-variant-numeric: tabular-nums; }
.bar { height: .8rem; width: 16rem; display: inline-block; vertical-align: middle; }
</style>
<h1 id="title"></h1>
<p id="summary" class="dim"></p>
<ul id="notes"></ul>
<h2>Selections against the layer's average</h2>
<p class="dim">1/16 or less <span class="bar" id="scale"></span> 16 x or more; rows are layers,
columns experts.</p>
<div class="map" id="map"><canvas id="heat"></canvas></div>
<p id="where">Point at a cell.</p>
<div class="plots">
<div><h2>Coverage</h2><svg id="coverage" viewBox="0 0 430 300"></svg></div>
<div id="caches-box"><h2>Cache size and hit rate</h2>
<svg id="caches" viewBox="0 0 430 300"></svg></div>
</div>
<h2>Domains</h2><div id="domains"></div>
<h2>Layers</h2><div id="layers" class="scroll"></div>
<script id="data" type="application/json">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent), r = data.report;
const get = id => document.getElementById(id), percent = x => (100 * x).toFixed(1) + " %";
const palette = ["#1b1b1b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
  "#8c564b", "#9467bd", "#7f7f7f", "#bcbd22", "#17becf"];
if (matchMedia("(prefers-color-scheme: dark)").matches) palette[0] = "#eeeeee";
document.title = get("title").textContent = data.title;
get("summary").textContent = `top ${r.top_k}, ${r.tokens.toLocaleString()} tokens, ` +
  `${r.domains.length} domain(s); fingerprint ${r.fingerprint.slice(0, 16)}`;
for (const note of r.notes) {
  const item = document.createElement("li");
  item.textContent = note;
  get("notes").append(item);
}
function color(relative) {  // blue below the average, white at it, red above
  const t = Math.max(-1, Math.min(1, Math.log2(Math.max(relative, 1e-9)) / 4));
  const end = t < 0 ? [5, 48, 97] : [103, 0, 31], a = Math.abs(t);
  return end.map(c => Math.round(247 + (c - 247) * a));
}
get("scale").style.background = "linear-gradient(90deg," +
  [1 / 16, 1 / 4, 1, 4, 16].map(x => `rgb(${color(x)})`).join() + ")";
const canvas = get("heat"), rows = r.selections.length;
const average = r.selections.map(s => s.reduce((a, b) => a + b, 0) / s.length);
canvas.width = r.n_experts;
canvas.height = rows;
canvas.style.height = Math.max(120, Math.min(900, rows * 12)) + "px";
const image = canvas.getContext("2d").createImageData(r.n_experts, rows);
r.selections.forEach((row, y) => row.forEach((count, x) => {
  image.data.set([...color(count / (average[y] || 1)), 255], 4 * (y * r.n_experts + x));
}));
canvas.getContext("2d").putImageData(image, 0, 0);
function label(kind, names, side, most) {  // every 1st, 2nd, 4th, ... of them
  let step = 1;
  while (names.length / step > most) step *= 2;
  for (let i = 0; i < names.length; i += step) {
    const e = document.createElement("span");
    e.className = kind;
    e.textContent = names[i];
    e.style[side] = 100 * (i + .5) / names.length + "%";
    get("map").append(e);
  }
}
label("layer", r.layers, "top", 32);
label("expert", Array.from({length: r.n_experts}, (_, i) => i), "left", 32);
canvas.addEventListener("mousemove", event => {
  const box = canvas.getBoundingClientRect();
  const x = Math.floor((event.clientX - box.left) / box.width * r.n_experts);
  const y = Math.floor((event.clientY - box.top) / box.height * rows);
  const count = r.selections[y] && r.selections[y][x];
  get("where").textContent = count === undefined ? "No expert here." :
    `layer ${r.layers[y]}, expert ${x}: ${count.toLocaleString()} selections, ` +
    `${(count / (average[y] || 1)).toFixed(2)} x the average`;
});
function make(name, attributes, text) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) e.setAttribute(key, attributes[key]);
  if (text !== undefined) e.textContent = text;
  return e;
}
function plot(id, curves, x_label, y_label) {
  const svg = get(id), left = 46, top = 8, width = 366, height = 240;
  for (let i = 0; i <= 5; i++) {
    const x = left + width * i / 5, y = top + height * (1 - i / 5);
    svg.append(make("path", {d: `M${left} ${y}h${width}M${x} ${top}v${height}`, stroke: "#8884"}));
    svg.append(make("text", {x: left - 6, y: y + 4, "text-anchor": "end"}, 20 * i));
    svg.append(make("text", {x: x, y: top + height + 15, "text-anchor": "middle"}, 20 * i));
  }
  svg.append(make("text", {x: left + width / 2, y: 294, "text-anchor": "middle"}, x_label));
  svg.append(make("text", {transform: `translate(12 ${top + height / 2}) rotate(-90)`,
    "text-anchor": "middle"}, y_label));
  curves.forEach((curve, i) => {
    const n = curve.y.length - 1, stroke = palette[i % palette.length];
    const dash = i < palette.length ? "" : "5 3";
    const points = curve.y.map((y, k) => `${left + width * k / n} ${top + height * (1 - y)}`);
    const line = make("polyline", {points: points.join(), fill: "none", stroke,
      "stroke-width": i ? 1.5 : 2.5, "stroke-dasharray": dash});
    line.append(make("title", {}, curve.name));
    svg.append(line);
    const x = left + width / 2 * (i % 2), y = top + height + 60 + 15 * Math.floor(i / 2);
    svg.append(make("path", {d: `M${x} ${y - 4}h18`, stroke, "stroke-width": 2,
      "stroke-dasharray": dash}));
    svg.append(make("text", {x: x + 24, y}, curve.name));
  });
  svg.setAttribute("viewBox", `0 0 430 ${top + height + 60 + 15 * Math.ceil(curves.length / 2)}`);
}
plot("coverage", data.curves, "hottest experts, % of all", "selections covered, %");
if (data.caches.length) plot("caches", data.caches, "cache, % of all experts", "hit rate, %");
else get("caches-box").remove();
function table(id, head, lines) {
  const t = document.createElement("table"), add = (cells, kind) => {
    const line = t.insertRow();
    for (const cell of cells) {
      const c = document.createElement(kind);
      c.textContent = cell;
      line.append(c);
    }
  };
  add(head, "th");
  lines.forEach(line => add(line, "td"));
  get(id).append(t);
}
table("domains", ["domain", "tokens", ...r.domains.map(d => "to " + d.name)],
  r.domains.map((d, i) => [d.name, d.tokens.toLocaleString(),
    ...r.domain_distances[i].map((x, k) => k === i ? "-" : x.toFixed(3))]));
table("domains", ["covered by 20 % of experts", "tokens", "by itself", "by the rest"],
  r.held_out.map(h => [h.name, h.tokens.toLocaleString(), percent(h.in_sample[2]),
    percent(h.held_out[2])]));
table("layers", ["layer", "experts", "effective", "Gini", "covered by 20 %", "least", "most",
  "hottest", "never"],
  r.rows.map(x => [x.layer, x.n_experts, x.effective_experts.toFixed(1), x.gini.toFixed(2),
    percent(x.coverage[2]), x.least.toLocaleString(), x.most.toLocaleString(), x.hottest,
    x.never.length]));
</script>
</html>
"""
