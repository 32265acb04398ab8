# SPDX-License-Identifier: Apache-2.0
"""Style and script of the report. Nothing here comes from a store."""

from __future__ import annotations

STYLE = """
:root { --line: #e3e7ed; --text: #17202c; --soft: #5d6b7c; --free: #dfe5ec; --short: #e8a33d; --used: #2f6fde; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--text); font: 14px/1.5 system-ui, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { margin: 0; font-size: 22px; overflow-wrap: anywhere; }
h2 { margin: 0 0 2px; font-size: 16px; overflow-wrap: anywhere; }
p { margin: 4px 0 8px; color: var(--soft); }
section { background: #ffffff; border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-top: 18px; }
pre { margin: 0; overflow-x: auto; font: 13px/1.35 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; color: var(--soft); font-size: 12.5px; margin: 4px 0 8px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
.cells { display: flex; flex-wrap: wrap; gap: 3px; margin: 4px 0 10px; }
.cell { flex: 1 1 14px; max-width: 28px; height: 36px; border-radius: 2px; overflow: hidden; display: flex;
  flex-direction: column; background: var(--free); }
.cell i { display: block; flex: none; } .cell .s { margin-top: auto; }
.cell.unknown { background: repeating-linear-gradient(45deg, var(--free) 0 3px, #c62f2f 3px 4px); }
.u { background: var(--used); } .s { background: var(--short); } .f { background: var(--free); }
.tree .node { display: flex; flex-wrap: wrap; align-items: flex-start; align-content: flex-start; overflow: hidden; }
.tree p { flex: 0 0 100%; height: 26px; margin: 0; padding-left: 5px; overflow: hidden; white-space: nowrap;
  border: solid #ffffff; border-width: 0 1px 1px 0; border-radius: 2px; cursor: pointer; color: var(--text);
  font-size: 11px; line-height: 25px; }
.tree .small > p { padding: 0; color: transparent; } .tree .thin > p { border: 0; }
.tree p:hover, .tree p:focus { outline: 1.5px solid var(--text); outline-offset: -1.5px; }
.tree .gone { display: none; } .tree .whole { width: 100% !important; }
.tree .all { background: var(--line); } .tree .k4, .tree .k5, .tree .k6 { color: #ffffff; }
.k0 { background: #dde3ea; } .k1 { background: #cfe0fb; } .k2 { background: #a9c8f7; } .k3 { background: #7badf0; }
.k4 { background: #4b8ce4; } .k5 { background: #2668c9; } .k6 { background: #12478f; }
@media print { body { font-size: 11px; } main { max-width: none; padding: 0; } section { break-inside: avoid; }
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
