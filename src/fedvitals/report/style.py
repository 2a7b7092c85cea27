# SPDX-License-Identifier: Apache-2.0
"""The style of a page: light or dark as the reader's system, and whole figures on paper."""

from __future__ import annotations

# Nothing may be loaded and nothing may run: pictures are in the page, so are their colours, and there is no script.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

STYLE = """
:root{color-scheme:light dark;--ink:#1c1c1c;--quiet:#5a5a5a;--paper:#fff;--hair:#d5d5d5;--note:#0072b2;
--warning:#8a5a00;--critical:#b34700;--ok:#00664a}
@media (prefers-color-scheme:dark){:root{--ink:#e6e6e6;--quiet:#a8a8a8;--paper:#141414;--hair:#3a3a3a;--note:#6cbcf0;
--warning:#e6a93c;--critical:#ff8a4d;--ok:#4fc79b}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;margin:2rem auto;
padding:0 1rem;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25}h2{font-size:1.3rem;margin-top:3rem;border-bottom:1px solid var(--hair)}
h3{font-size:1rem;margin:2rem 0 .5rem}h4{font-size:.95rem;margin:1rem 0 .25rem}
a{color:inherit}figure{margin:1rem 0}figure svg{display:block;width:100%;min-width:40rem;height:auto;max-width:52rem}
figcaption{color:var(--quiet);font-size:13px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;line-height:1.4}
caption{text-align:left;font-weight:600;padding:1rem 0 .25rem}
th,td{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;border-bottom:1px solid var(--hair)}
td,th{overflow-wrap:break-word;max-width:28rem}th.num,td.num{text-align:right;white-space:nowrap}
th{color:var(--quiet);font-weight:600}code,pre{font:13px/1.5 ui-monospace,monospace}
pre{border:1px solid var(--hair);padding:.5rem .75rem;overflow-x:auto;white-space:pre-wrap}
.quiet{color:var(--quiet);font-size:13px}.lead{font-size:1.1rem}
nav ol{columns:2;font-size:13px;list-style:none;padding:0}nav .level-3{padding-left:1rem}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(15rem,1fr));gap:.5rem 1.5rem;margin:1rem 0;font-size:14px}
dt{color:var(--quiet);font-size:13px}dd{margin:0}
.card{border-left:3px solid var(--hair);padding:0 0 0 1rem;margin:1.5rem 0}.card h3{margin-top:0}
.verdict{border-left-width:6px}.verdict .lead{margin:.25rem 0;font-weight:600}
.critical,.ill{border-color:var(--critical)}.warning{border-color:var(--warning)}.note,.watch{border-color:var(--note)}
.healthy{border-color:var(--ok)}
footer{color:var(--quiet);font-size:13px;margin-top:3rem;border-top:1px solid var(--hair)}
@media (max-width:40rem){nav ol{columns:1}}
@media print{:root{font-size:12px;color-scheme:light;--ink:#000;--quiet:#444;--paper:#fff;--hair:#bbb;--note:#0072b2;
--warning:#8a5a00;--critical:#b34700;--ok:#00664a}@page{size:A4;margin:13mm 12mm}
body{margin:0;padding:0;max-width:none;font-size:9.5pt;line-height:1.4;orphans:3;widows:3}
h2{margin-top:1.75rem}h3{margin:1.25rem 0 .25rem}h2,h3,h4,caption,thead{break-after:avoid}p,ol,ul,dl{margin:.5rem 0}
table,code,pre,figcaption,dt,nav ol,.quiet,footer{font-size:8.5pt}dl{font-size:9.5pt;gap:.25rem 1.5rem}
figure{margin:.5rem 0}figure svg{min-width:0;max-width:none}
figure,tr,pre,dl>div,.verdict,table.short{break-inside:avoid}thead{display:table-header-group}
.card{padding-left:.6rem;margin:.75rem 0}.wide{overflow:visible}a{text-decoration:none}}
"""

PAGE = (
    '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
    f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
    '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
    "<title>{title}</title>\n<style>" + STYLE.replace("{", "{{").replace("}", "}}") + "</style></head>\n"
    "<body>\n<header>\n{before}\n</header>\n{contents}\n<main>\n{sections}\n</main>\n{foot}</body>\n</html>\n"
)
