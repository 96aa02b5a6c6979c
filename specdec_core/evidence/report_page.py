"""The report's page: one Jinja template, styles inside, nothing fetched from anywhere."""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>specdec: report</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .5rem; border-bottom: 1px solid #ddd; }
th { background: #f4f4f4; } td.verdict { white-space: nowrap; font-weight: 600; }
.SUPPORTED { color: #00694b; } .REFUTED, .STALE { color: #a33; } .INCONCLUSIVE { color: #8a5a00; }
.NOT { color: #666; font-weight: 400 !important; }
.note { color: #555; font-size: 12px; }
figure { margin: 2rem 0; } figure img { max-width: 100%; } figcaption { font-size: 13px; color: #444; }
dl { display: grid; grid-template-columns: max-content auto; gap: .2rem 1rem; font-size: 13px; }
dt { font-weight: 600; } dd { margin: 0; }
</style>
</head>
<body>
<h1>Speculative decoding: claims, figures, provenance</h1>
<p>{{ summary }}</p>

<h2>Claims</h2>
<div class="wide"><table>
<thead><tr><th>id</th><th>claim</th><th>paper</th><th>to reach here</th><th>verdict</th><th>measured</th>
<th>evidence</th><th>device</th></tr></thead>
<tbody>
{% for row in claims %}
<tr><td>{{ row.id }}</td>
<td>{{ row.statement }}{% if row.note %}<div class="note">{{ row.note }}</div>{% endif %}</td>
<td>{{ row.paper }}</td><td>{{ row.ours }}</td>
<td class="verdict {{ row.verdict.split(' ')[0] }}">{{ row.verdict }}{% if row.how %}
<div class="note">{{ row.how }}</div>{% endif %}</td>
<td>{{ row.measured }}</td><td>{{ row.evidence }}</td><td>{{ row.device }}</td></tr>
{% endfor %}
</tbody>
</table></div>

<h2>Figures</h2>
{% for figure in figures %}
<figure><img src="data:image/png;base64,{{ figure.png }}" alt="{{ figure.alt }}">
<figcaption><b>{{ figure.name }}.</b> {{ figure.caption }}</figcaption></figure>
{% else %}
<p>None yet: run <code>make reproduce</code>.</p>
{% endfor %}

<h2>Notebooks</h2>
<ul>
{% for notebook in notebooks %}<li><a href="{{ notebook.href }}">{{ notebook.name }}</a>, {{ notebook.origin }}</li>
{% else %}<li>None yet.</li>
{% endfor %}
</ul>

<h2>Provenance</h2>
{% for block in provenance %}
<h3>{{ block.title }}</h3>
<dl>{% for name, value in block.entries %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
{% endfor %}
</body>
</html>
"""
