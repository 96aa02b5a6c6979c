"""Programming prompts to fill in, about half of them with code to repeat; templates.py tells how «…» is read."""

from __future__ import annotations

WORDS = {
    "language": "Python|JavaScript|Java|Ruby|Go|C#|Kotlin|TypeScript|PHP|Swift|Rust|C++",
    "script": "Python|JavaScript|Ruby|TypeScript|PHP|Kotlin|Lua|Perl",
    "value": "price|weight|height|score|balance|distance|speed|volume|salary|rating|duration|pressure|depth|level|"
    "rent|tax",
    "many": "orders|tickets|sensors|recipes|players|invoices|parcels|courses|planets|robots|gardens|rooms|songs|"
    "flights|houses|teams",
    "Thing": "Ticket|Sensor|Recipe|Player|Invoice|Parcel|Course|Planet|Robot|Garden|Ferry|Song|Kettle|Elevator|Bakery|"
    "Tram",
    "verb": "collect|select|update|print|check|store|export|filter|prepare|compare|merge|archive",
    "short": "n|k|v|t|q|z|w|p|m|u",
    "label": "result|current|amount|entry|found|latest|answer|buffer|picked|draft",
    "file": "orders.csv|notes.txt|sensors.json|members.csv|diary.txt|prices.json|songs.csv|routes.txt|results.tsv|"
    "users.json",
    "folder": "reports|archive|photos|incoming|exports|drafts|invoices|music|snapshots|logs",
    "word": "apple|river|window|silver|market|pencil|garden|thunder|violet|summer|bridge|copper",
    "town": "Lisbon|Turin|Bergen|Quito|Kyoto|Perth|Dakar|Riga|Bilbao|Halifax|Cork|Izmir",
    "field": "phone|nickname|birthday|postcode|country|language|level|website|photo|badge",
    "topic": "a stack and a queue|a class and an object|a compiler and an interpreter|a thread and a process|"
    "an argument and a parameter|a branch and a commit|an array and a linked list|GET and POST|"
    "a unit test and an integration test|a float and an integer|a while loop and a for loop|"
    "a shallow copy and a deep copy",
    "method": "append|pop|sort|index|count|insert|reverse|extend|remove",
    "textmethod": "upper|replace|split|join|startswith|find|title|zfill|isdigit|rstrip",
    "task": "reverse the words of a sentence|count the capital letters in a text|remove the duplicates from a list|"
    "find the longest word in a text|add up the digits of a number|merge two sorted lists|"
    "turn seconds into hours, minutes and seconds|check whether two words are anagrams|rotate a list to the left|"
    "group words by their first letter|find the smallest gap between two numbers of a list|"
    "list the divisors of a number|count how often a pair of letters occurs|transpose a matrix",
    "tool": "a to-do list|a coin toss game|a unit converter|a guessing game|a shopping basket|"
    "a quiz with three questions|a dice simulator|a stopwatch|a password generator|a phone book|a tip calculator|"
    "a word counter",
    "reader": "a beginner|a colleague who knows only spreadsheets|a student in the first week|"
    "an experienced Java programmer|a designer|a curious teenager|a tester|a mathematician",
    "error": "IndexError|KeyError|TypeError|NameError|AttributeError|ValueError|ImportError|RecursionError|"
    "FileNotFoundError|UnicodeDecodeError|IndentationError",
    "git": "undo the last commit|make a new branch|list all branches|show the history|save changes for later|"
    "rename a branch|see who changed a line|fetch without merging|tag a release|delete a branch",
    "css": "centre a heading|round the corners of a box|make text bold|hide an element|change the background|"
    "add a shadow|set the width to half|remove the bullets of a list|put a border around a picture|make links green",
    "sqlwhat": "the average|the largest|the smallest|the total|the second largest",
}

SHORT = {
    "slice": "If s = '«word»«word.2»', what is s[«0..2»:«3..6»] in Python?",
    "range": "List the numbers that range(«0..9», «20..48», «2..7») gives in Python.",
    "modulo": "What do «101..999» // «3..17» and «102..999» % «4..19» give in Python?",
    "sql_one": "Write one SQL statement that finds «sqlwhat» «value» in the table «many».",
    "listcall": "After a = [«1..30», «31..60», «61..90»], what does a.«method»() need in its brackets, if anything?",
    "textcall": "Show a one-line example of the Python method `«textmethod»` with the text '«word» «word.2»'.",
    "git": "With which Git command can I «git» in a project called «word»-«word.2»?",
    "error": "Give one line of Python that raises «error», using a variable named `«value»` or `«many»`.",
    "css": 'Which CSS rule would «css» in an element of the class "«word»" but not of "«word.2»"?',
    "constant": "How do you declare a constant `«value»` with the value «11..980» in «language»?",
    "dictionary": "In «script», how do you read the entry '«value»' of `«word»` if it may be missing?",
    "binary": "Write «18..250» in binary and «19..255» in hexadecimal.",
    "sort_key": "Give the Python call that sorts `«many»` by «value», the largest first, and equal ones by «field».",
    "regex": "Write a regular expression for the word «word» followed by «2..6» to «7..19» digits.",
}

LONG = {
    "rename": "In this function, call `«short»` «label» instead, and show all of it again.\n\n```python\ndef "
    "«verb»_«many»(«many»):\n    «short» = []\n    for item in «many»:\n        if item.«value» > "
    "«10..90»:\n            «short».append(item)\n    print('kept', len(«short»))\n    return «short»\n```",
    "task": "Write a «language» function that can «task». Comment on the steps, and add «2..4» example calls with "
    "their results.",
    "fix_bug": "«Thing» objects disappear here. Say which line is to blame and print the repaired "
    "code.\n\n```python\ndef drop_«many»(«many», limit):\n    for «short» in «many»:\n        if «short».«value» > "
    "limit + «1..40»:\n            «many».remove(«short»)\n    return «many»\n```",
    "docstrings": "Give these functions docstrings of one line. Leave everything else as it is.\n\n```python\ndef "
    "«value»_of(«short»):\n    return «short».«value» * «2..90»\n\n\ndef total_«value»(«many»):\n    return "
    "sum(«value»_of(«short») for «short» in «many»)\n\n\ndef is_cheap(«short»):\n    return «value»_of(«short») < "
    "10\n```",
    "class_methods": "Finish the class: write `rename`, `is_full` and `__str__`.\n\n```python\nclass «Thing»:\n    "
    "def __init__(self, name, «value», capacity=«10..80»):\n        self.name = name\n        self.«value» = "
    "«value»\n        self.capacity = capacity\n        self.«many» = []\n\n    def add(self, item):\n        "
    "self.«many».append(item)\n```",
    "line_by_line": "Walk «reader» through this program, one line after the other.\n\n```python\n«many» = "
    "open('«file»').read().splitlines()\n«label» = {}\nfor line in «many»[«1..3»:]:\n    key = line[:«2..9»]\n    "
    "«label»[key] = «label».get(key, 0) + len(line)\nprint(sorted(«label»))\n```",
    "type_hints": "Put type hints on the arguments and return values, and repeat the module in "
    "full.\n\n```python\ndef «verb»_«value»(«value», factor=«2..20»):\n    return round(«value» * factor, 2)\n\n\ndef "
    "names(«many»):\n    return [«short»['name'] for «short» in «many»]\n\n\ndef has(«many», name):\n    return name "
    "in names(«many»)\n```",
    "translate": "Port this to «language» without changing any names.\n\n```python\ndef «verb»_«value»s(«many»):\n    "
    "«label» = 0\n    for «short» in «many»:\n        if «short» % «2..9» == 0:\n            «label» += "
    "«short»\n        else:\n            «label» -= 1\n    return «label»\n```",
    "json_add": 'Add the key "«field»" with a fitting value to every object of this JSON and print it '
    'whole.\n\n```json\n[\n  {"id": «10..39», "name": "«word»", "«value»": «100..400»},\n  {"id": «40..69», '
    '"name": "«word.2»", "«value»": «401..900»},\n  {"id": «70..99», "name": "«word.3»", "«value»": '
    "0}\n]\n```",
    "sql_change": "Extend this definition by the column `«field»`, forbid negative values of «value», and write it "
    "out.\n\n```sql\nCREATE TABLE «many» (\n    id INTEGER PRIMARY KEY,\n    name VARCHAR(«20..90»),\n    «value» "
    "NUMERIC,\n    town VARCHAR(40) DEFAULT '«town»'\n);\n```",
    "tests": "Write pytest tests for this function, at least «3..5» of them, each with a telling "
    "name.\n\n```python\ndef «value»_class(«value»):\n    if «value» < «2..20»:\n        return 'low'\n    if «value» "
    "< «30..80»:\n        return 'middle'\n    return 'high'\n```",
    "constants": "Numbers are scattered over this code. Give them names at the beginning of the file and show the "
    "file.\n\n```python\ndef fee(«value»):\n    if «value» > «50..90»:\n        return «value» * 0.«11..39»\n    if "
    "«value» > «11..40»:\n        return «value» * 0.«41..79» + «2..9»\n    return «10..30»\n```",
    "loop_instead": "Shorten this with a loop over a list.\n\n```python\nprint('«word»', «10..40»)\nprint('«word.2»', "
    "«41..60»)\nprint('«word.3»', «61..80»)\nprint('«word.4»', «81..99»)\nprint('done with «many»')\n```",
    "comprehension": "Say the same with a comprehension, then put both forms side by side and compare "
    "them.\n\n```python\n«label» = {}\nfor «short» in «many»:\n    if len(«short») > «2..12»:\n        "
    "«label»[«short»] = «short».strip()\n```",
    "config": "Below is the service for «town». Produce the same block for «town.2» and for «town.3», on the next two "
    "ports.\n\n```yaml\n- name: «many»-«town»\n  port: «3000..9000»\n  memory: «2..32»GB\n  path: /srv/«folder»\n  "
    "restart: daily\n```",
    "shell": "Write a Bash script that moves all files older than «3..60» days from «folder» to «folder.2» and writes "
    "their names into «file». Explain the options that you use.",
    "difference": "What is the difference between «topic»? Explain it to «reader», with a small piece of «script».",
    "tool": "Program «tool» for the command line in «script», in fewer than «25..60» lines, and describe how to start "
    "it.",
    "new_class": "Design a «language» class `«Thing»` with a «value», a list of «many» and three useful methods. Show "
    "how somebody would use it.",
    "read_file": "Write a Python program that reads «file», skips the first «1..5» lines, and prints the «3..12» "
    "lines with the largest «value». Treat a missing file kindly.",
    "log_lines": "Insert a print at the start of each function that tells its name and «value». Print all the "
    "code.\n\n```python\ndef open_«many»(«value»):\n    return ['«word»'] * «value»\n\n\ndef "
    "close_«many»(«value»):\n    «label» = «value» - «1..60»\n    return max(«label», 0)\n```",
    "html": 'Add a third row for «town» and a column "«field»" to this table, and give the whole '
    'table.\n\n```html\n<table class="«word»">\n  <tr><th>Town</th><th>«value»</th></tr>\n  '
    "<tr><td>«town.2»</td><td>«10..99»</td></tr>\n  <tr><td>«town.3»</td><td>«100..990»</td></tr>\n</table>\n```",
    "style": "Tidy this up: one statement a line, spaces around operators, and a longer name for "
    "`«short»`.\n\n```python\ndef «verb»_it(«short»,«value»=«10..99»):\n  if «short»>«value»: print('«word»');return "
    "«short»-«value»\n  else: print('«word.2»');return «value»+«2..9»\n```",
    "error_meaning": "A script about «many» stops with «error» in line «3..140». Explain to «reader» what that means, "
    "name two usual causes, and show for each how to mend it.",
    "review": "Review this change as you would for «reader». Quote every line that you talk about.\n\n```diff\n-def "
    "«verb»(«many»):\n+def «verb»(«many», «value»=«2..70»):\n-    return «many»[0]\n+    return [«short» for «short» "
    "in «many» if «short» >= «value»]\n```",
    "cases": "Add «4..6» more lines to this list in the same manner, and close it properly.\n\n```python\n«label» = "
    "[\n    {'town': '«town»', '«value»': «10..99», 'open': True},\n    {'town': '«town.2»', '«value»': «100..400», "
    "'open': False},\n```",
}
