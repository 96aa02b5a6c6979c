"""Mathematical prompts to fill in; how the slots «…» are read is told in templates.py."""

from __future__ import annotations

WORDS = {
    "person": "Nadia|Ivo|Petra|Samir|Greta|Malik|Tessa|Jonas|Aiko|Rosa|Emil|Farida|Hugo|Lina|Oskar|Priya|Quentin|"
    "Sofia|Viktor|Wanda|Yusuf|Zoe|Marek|Dalia",
    "goods": "stickers|pencils|buttons|seashells|postcards|stamps|beads|acorns|badges|tiles|candles|ribbons|notebooks|"
    "bolts|lanterns|sponges|tulip bulbs|paper bags",
    "ware": "a lamp|a kettle|a backpack|a blanket|a clock|a chair|a jacket|a tennis racket|a pair of boots|a suitcase|"
    "a bookcase|a saddle|a garden hose|a violin bow|a mirror",
    "currency": "euros|dollars|pounds|francs|crowns|rupees",
    "holder": "box|crate|basket|jar|bag|drawer|tin|bucket|bowl|chest",
    "colour": "red|blue|green|yellow|white|black|orange|purple|brown|silver",
    "ingredient": "rice|sugar|lentils|oats|almonds|raisins|grated cheese|carrots|mushrooms|noodles|plain yoghurt|"
    "semolina",
    "vehicle": "bus|lorry|ferry|motorbike|van|tram|goods train|camper",
    "surface": "carpet|football banner|garden bed|stage|car park|wall|sheet of plywood|swimming pool|sandpit|field",
    "percent": "5|8|12|15|18|20|24|30|35|40|45|60|75|85",
    "divisor": "2|3|4|5|6|7|8|9|11|12|13",
    "units": "kilometres to metres|metres to millimetres|hours to seconds|days to hours|weeks to days|"
    "kilograms to grams|tonnes to kilograms|litres to millilitres|square metres to square centimetres|"
    "centuries to years",
    "place": "one decimal place|two decimal places|the nearest whole number|the nearest ten",
    "base": "base two|base three|base five|base eight|base sixteen",
    "pupil": "a child of nine|a friend who skipped the lesson|your grandmother|a class of beginners|"
    "somebody who fears numbers|a new pupil|a shopkeeper|a carpenter",
    "idea": "a percentage|a ratio|the least common multiple|a square root|a remainder|an average|a negative number|"
    "a variable|a power|rounding|a proportion|place value",
    "claim": "a multiple of six is even|the product of two odd numbers is odd|"
    "the square of an even number is a multiple of four|three consecutive whole numbers add up to a multiple of three|"
    "an odd number minus an even number is odd|a number ending in zero is a multiple of five|"
    "the sum of two multiples of seven is one too|the difference of two squares of odd numbers is a multiple of eight",
    "mistake": "forgot to carry|swapped two digits|multiplied before adding|lost the minus sign|"
    "read the ruler wrongly|mixed up metres and centimetres|divided the wrong way round|counted one step twice",
    "solid": "a brick|a fish tank|a shoebox|a concrete block|a drawer|a lunch box|a bar of soap|a raised bed",
    "event": "concert|flea market|school play|football match|science fair|museum night|harbour tour|film evening",
}

SHORT = {
    "sum": "Add «231..989» and «117..864».",
    "difference": "Take «113..478» away from «521..996».",
    "product": "How much is «12..49» times «13..38»?",
    "remainder": "Divide «101..899» by «3..19» and give the remainder as well.",
    "percent": "Work out «percent» % of «110..990» «currency».",
    "fractions": "Which fraction is smaller, «2..9»/«11..19» or «3..11»/«21..29»?",
    "units": "Convert «3..96» «units».",
    "sequence": "A sequence starts at «3..40» and grows by «4..17» each time. What is its term number «8..25»?",
    "clock": "The «event» starts at «13..20» o'clock and lasts «71..178» minutes. When is it over?",
    "change": "«person» pays for «ware», which costs «11..96» «currency», with a note of 100. How much change is due?",
    "surface": "A «surface» is «4..29» m long and «3..18» m wide. What area does it cover?",
    "angles": "Two angles of a triangle have «21..79» and «24..88» degrees. How large is the third?",
    "divisible": "Can «203..997» be divided by «divisor» without a remainder? Say yes or no, and why in a few words.",
    "rounding": "Round «12..989».«101..989» to «place».",
    "power": "Calculate «2..12» to the power of «2..5», minus «3..60».",
    "function": "Let f(x) = «2..9»x + «3..48». Find f(«4..25»).",
    "average": "Give the average of «11..60», «12..61» and «13..62».",
    "base": "Write the number «17..240» in «base».",
}

LONG = {
    "shopping": "«person» buys «3..9» «goods» at «2..14» «currency» each and «2..8» «goods.2» at «3..19» «currency» "
    "each. Work out the sum in small steps, then say what is left of «250..400» «currency».",
    "sharing": "«person», «person.2» and «person.3» divide «120..480» «goods» in the ratio «2..5» to «3..7» to "
    "«1..4». Explain what the ratio means, then compute each share on a line of its own.",
    "equation": "Find x: «3..9»x - «4..38» = «21..90». Name the rule that each line uses, and test your solution at "
    "the end.",
    "multiples": "Write «8..14» multiples of «13..49», from «101..300» upwards, as a numbered list, and behind each "
    "the sum of its digits.",
    "gaps": "Fill the gaps and write out all five lines.\n\n«11..40» + ___ = «50..99»\n___ - «12..31» = "
    "«14..60»\n«3..9» x ___ = 72\n«120..160» / ___ = 4\n___ + ___ = «15..35»",
    "wrong_line": "«person» «mistake» in one of these lines. Copy all of them and mend the wrong one.\n\n«a=12..38» + "
    "«b=21..49» = «62..90»\n«a» x 3 = «40..110»\n«b» - 9 = «12..40»\n«b» x 2 = «44..99»",
    "by_example": "Look at the example and treat «18..58» and «62..99» alike.\n\nExample: is «b=31..59» nearer to "
    "«c=10..29» or to «d=61..90»?\n1. From «c» to «b» it is so far: take «c» from «b».\n2. From «b» to «d» it is so "
    "far: take «b» from «d».\n3. The smaller one tells.\n\nUse «c» and «d» for the new numbers too.",
    "fractions_explained": "Show «pupil» how to work out «2..5»/«7..11» plus «1..4»/«12..15». Begin with what the two "
    "numbers of a fraction stand for, and draw nothing.",
    "line": "Make a table of y = «2..9»x - «1..20» for every whole x from «1..4» to «9..14», with one column for x, "
    "one for the working and one for y.",
    "counting": "Count from «13..80» up to at least «260..390» in steps of «7..19». Put six numbers on each line.",
    "amounts": "This list is meant for «4..6» guests.\n\n- «150..400» g of «ingredient»\n- «80..240» g of "
    "«ingredient.2»\n- «2..5» onions\n- «300..900» ml of water\n\nWrite it again in the same form for «7..15» guests.",
    "savings": "«person» puts «400..4800» «currency» into an account at «2..7» percent a year. Write the balance "
    "after each of the first «4..8» years, one line for a year, and describe how it grows.",
    "solid": "The sides of «solid» measure «14..40», «8..25» and «5..16» centimetres. Find its volume and its "
    "surface, and tell what every product in your calculation stands for.",
    "median": "Sort these values from low to high, and find the median and the range: «11..99», «10..98», «12..97», "
    "«13..96», «14..95», «15..94», «16..93». Say in a sentence what the median tells about them.",
    "meeting": "A «vehicle» and a «vehicle.2» start towards each other from two towns that are «180..640» km apart, "
    "at «35..60» and «61..90» km per hour. Explain step by step when and where they meet.",
    "claim": "Show that «claim». Give a reason that covers all cases, and then two examples with numbers above "
    "«20..90».",
    "chance": "A «holder» holds «3..20» «colour», «2..15» «colour.2» and «1..9» «colour.3» marbles. One is taken "
    "blindly. State the chance of each colour as a fraction, as a decimal and as a percentage.",
    "idea": "What is «idea»? Explain it to «pupil» in plain words, and work through an example that uses the numbers "
    "«12..48» and «3..11».",
    "columns": "Multiply «123..489» by «14..79» in columns, the way it is taught at school. Write the layout first, "
    "and then describe how each row of it came about.",
    "bill": "Copy this bill, put the amount behind every line and the total below.\n\n«goods»: «3..12» at «2..15» "
    "«currency»\n«goods.2»: «2..9» at «4..19» «currency»\n«goods.3»: «5..20» at «1..7» «currency»\nTotal:",
    "rewrite_words": "Rewrite this story with «a=14..60» instead of «b=61..95» and correct everything that follows "
    "from it.\n\n«person» has «b» «goods» in a «holder». Half of them go to «person.2», who keeps them in a "
    "«holder.2» of «colour» wood. Of the other half, «3..9» are lost on the way home. So fewer than «b» are left.",
    "story": "Invent a word problem about «person», a «event» and «40..300» tickets, for which one has to divide by "
    "«3..12». Then solve it the way a patient teacher would.",
    "quote_answer": "Read the report and answer with the sentences that say it.\n\nThe «event» had «120..480» "
    "visitors on Friday. On Saturday there were «30..90» more. «person» sold «20..80» «goods» and «person.2» twice as "
    "many. All the money, «500..900» «currency», went to the town library.\n\nHow many came on Saturday? Who sold "
    "more? Where did the money go?",
}
