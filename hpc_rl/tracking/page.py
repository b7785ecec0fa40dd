"""The report's HTML, as a Jinja template: one file, no network, light and dark."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ name }} · hpc-rl</title>
<style>
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #16202c; --soft: #5d6b7a; --line: #e3e7ec;
  --c0: #2563c9; --c1: #d9622b; --c2: #1a8f74; --c3: #b8860b; --c4: #8a4fbf; --c5: #c2417c; --c6: #4b8fb5;
  --c7: #7a7f87; --good: #1a8f74; }
@media (prefers-color-scheme: dark) { :root { --page: #11161c; --card: #1a2129; --ink: #e6ebf1; --soft: #94a2b2;
  --line: #2b3540; --c0: #6aa1f5; --c1: #f0935f; --c2: #4cc2a4; --c3: #dcb248; --c4: #b78ae0; --c5: #e77fad;
  --c6: #7fbcdd; --c7: #9aa1aa; --good: #4cc2a4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 56px; }
h1 { margin: 0; font-size: 26px; line-height: 1.25; overflow-wrap: anywhere; }
.about { margin: 4px 0 24px; color: var(--soft); }
.state { color: var(--ink); font-weight: 600; } .state.done { color: var(--good); }
.bar { height: 6px; border-radius: 3px; background: var(--line); overflow: hidden; margin: 0 0 24px; }
.bar div { height: 100%; background: var(--c0); } .bar.done div { background: var(--good); }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 0 0 24px; }
.numbers div, figure, details { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.numbers div { padding: 12px 14px; }
.numbers span { display: block; color: var(--soft); font-size: 13px; }
.numbers b { font-size: 17px; font-weight: 600; white-space: nowrap; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 14px 16px 8px; }
figcaption { font-weight: 600; display: flex; flex-wrap: wrap; gap: 2px 14px; align-items: baseline; }
figcaption small { color: var(--soft); font-weight: 400; }
.key { font-size: 13px; font-weight: 400; color: var(--soft); white-space: nowrap; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }
svg { width: 100%; height: auto; display: block; margin-top: 6px; }
.grid { stroke: var(--line); } .tick { fill: var(--soft); font: 11px system-ui, sans-serif; }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
circle.faint { opacity: 0; } circle.faint:hover { opacity: 1; }
{% for i in range(8) -%}
polyline.s{{ i }} { stroke: var(--c{{ i }}); } circle.s{{ i }}, polygon.s{{ i }}, i.s{{ i }} { fill: var(--c{{ i }}); }
i.s{{ i }} { background: var(--c{{ i }}); }
{% endfor -%}
details { margin-top: 24px; padding: 12px 16px; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; margin: 10px 0 2px; font: 13px/1.5 ui-monospace, monospace; }
</style>
</head>
<body>
<main>
<h1>{{ name }}</h1>
<p class="about"><span class="state{{ ' done' if done }}">{{ state }}</span>
{%- for fact in facts %} · {{ fact }}{% endfor %}</p>
<div class="bar{{ ' done' if done }}"><div style="width: {{ percent }}%"></div></div>
{% if numbers -%}
<section class="numbers">
{% for label, value in numbers %}<div><span>{{ label }}</span><b>{{ value }}</b></div>
{% endfor %}</section>
{% endif -%}
<section class="plots">
{% for plot in plots %}<figure><figcaption>{{ plot.title }}{% if plot.unit %} <small>{{ plot.unit }}</small>{% endif %}
{% if plot.keys|length > 1 %}{% for key in plot.keys %}
<span class="key"><i class="s{{ loop.index0 }}"></i>{{ key }}</span>
{% endfor %}{% endif %}</figcaption>{{ plot.svg|safe }}</figure>
{% endfor %}</section>
{% if config %}<details><summary>Configuration</summary><pre>{{ config }}</pre></details>
{% endif -%}
</main>
</body>
</html>
"""
