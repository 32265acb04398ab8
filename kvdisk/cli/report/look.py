# SPDX-License-Identifier: Apache-2.0
"""Style and script of the report. Nothing here comes from a store."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark;
  --ground: #f6f7f9; --card: #ffffff; --line: #e3e7ed; --text: #17202c; --soft: #5d6b7c; --accent: #2f6fde;
  --free: #dfe5ec; --short: #e8a33d; --bad: #c62f2f; --bad-ground: #fdeeee; --good: #1f8a4c; --edge: #ffffff;
  --r0: #dde3ea; --r1: #cfe0fb; --r2: #a9c8f7; --r3: #7badf0; --r4: #4b8ce4; --r5: #2668c9; --r6: #12478f;
  --on-pale: #17202c; --on-deep: #ffffff; }
@media screen and (prefers-color-scheme: dark) { :root {
  --ground: #10151c; --card: #19212b; --line: #2a3542; --text: #e4eaf1; --soft: #93a2b3; --accent: #6ea4f4;
  --free: #2c3744; --short: #d3922f; --bad: #ff7b72; --bad-ground: #33191b; --good: #56c482; --edge: #19212b;
  --r0: #323e4c; --r1: #24426e; --r2: #255591; --r3: #2d6cb8; --r4: #4b8ce4; --r5: #84b3f2; --r6: #c3dbfa;
  --on-pale: #e4eaf1; --on-deep: #0c1118; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 14px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 24px 48px; }
header h1 { margin: 0; font-size: 22px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
header p { margin: 4px 0 0; color: var(--soft); overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-top: 18px; }
h2 { margin: 0 0 2px; font-size: 16px; } h3 { margin: 16px 0 6px; font-size: 13px; font-weight: 600; }
.note { margin: 0 0 10px; color: var(--soft); max-width: 86ch; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(168px, 1fr)); gap: 12px; margin-top: 18px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.tile b { display: block; font-size: 22px; font-weight: 650; letter-spacing: -0.02em; line-height: 1.3; }
.tile span { color: var(--soft); font-size: 12.5px; } .tile .name { color: var(--text); font-weight: 600; }
.meter { height: 6px; border-radius: 3px; background: var(--free); margin: 6px 0 2px; overflow: hidden; }
.meter i { display: block; height: 100%; background: var(--accent); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 8px 40px; }
.chart div { display: flex; align-items: center; font-size: 11px; line-height: 21px; font-weight: 600; }
.chart span { flex: 0 0 74px; padding-right: 8px; text-align: right; font-weight: 400; color: var(--soft); }
.chart i { height: 15px; min-width: 1px; margin-right: 6px; border-radius: 0 2px 2px 0; background: var(--accent); }
.chart .other { background: var(--soft); opacity: .55; }
.cells { display: flex; flex-wrap: wrap; gap: 3px; margin: 4px 0 10px; }
.cell { flex: 1 1 14px; max-width: 28px; height: 36px; border-radius: 2px; overflow: hidden; display: flex;
  flex-direction: column; background: var(--free); }
.cell i { display: block; flex: none; } .cell .s { background: var(--short); margin-top: auto; }
.cell .u { background: var(--accent); }
.cell.unknown { background: repeating-linear-gradient(45deg, var(--free) 0 3px, var(--bad) 3px 4px); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; color: var(--soft); font-size: 12.5px; margin: 4px 0 8px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px;
  vertical-align: -1px; }
.tree .node { display: flex; flex-wrap: wrap; align-items: flex-start; align-content: flex-start; overflow: hidden; }
.tree p { flex: 0 0 100%; height: 26px; margin: 0; padding-left: 5px; overflow: hidden; white-space: nowrap;
  border: solid var(--edge); border-width: 0 1px 1px 0; border-radius: 2px; cursor: pointer; color: var(--on-pale);
  font-size: 11px; line-height: 25px; }
.tree .small > p { padding: 0; color: transparent; } .tree .thin > p { border: 0; }
.tree p:hover, .tree p:focus { outline: 1.5px solid var(--text); outline-offset: -1.5px; }
.tree .gone { display: none; } .tree .whole { width: 100% !important; }
.tree .all { background: var(--line); }
.tree .k4 { color: #ffffff; } .tree .k5, .tree .k6 { color: var(--on-deep); }
.k0 { background: var(--r0); } .k1 { background: var(--r1); } .k2 { background: var(--r2); }
.k3 { background: var(--r3); } .k4 { background: var(--r4); } .k5 { background: var(--r5); }
.k6 { background: var(--r6); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } td.n, th.n { text-align: right; }
td.wrap { white-space: normal; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; } code { font: 12.5px ui-monospace, Menlo, Consolas, monospace; }
.alive { color: var(--good); } .orphan { color: var(--short); } .soft { color: var(--soft); }
.problems { border-color: var(--bad); background: var(--bad-ground); } .problems h2 { color: var(--bad); }
.problems ul { margin: 6px 0 0; padding-left: 20px; overflow-wrap: anywhere; }
details summary { cursor: pointer; color: var(--accent); margin-top: 8px; }
footer { color: var(--soft); margin-top: 18px; font-size: 12.5px; }
@media print { :root { --ground: #ffffff; } body { font-size: 11px; } main { max-width: none; padding: 0; }
  section, .tile { break-inside: avoid; border-color: #cccccc; } details { display: none; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } .hint { display: none; } }
"""

SCRIPT = """
for (const tree of document.querySelectorAll('.tree')) {
  const nodes = [...tree.querySelectorAll('.node')];
  const show = chosen => {
    for (const node of nodes) {
      const above = node.contains(chosen);
      node.classList.toggle('whole', above);
      node.classList.toggle('gone', !above && !chosen.contains(node));
    }
    const widths = nodes.map(node => node.offsetWidth);
    nodes.forEach((node, at) => {
      node.classList.toggle('small', widths[at] < 62);
      node.classList.toggle('thin', widths[at] < 4);
    });
  };
  for (const node of nodes) {
    node.firstElementChild.addEventListener('click', () => show(node));
    node.firstElementChild.addEventListener('keydown', event => { if (event.key === 'Enter') show(node); });
  }
  document.addEventListener('keydown', event => { if (event.key === 'Escape') show(nodes[0]); });
  show(nodes[0]);
}
"""
