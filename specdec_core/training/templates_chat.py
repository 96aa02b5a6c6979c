"""Everyday prompts to fill in, about a third of them with a text to repeat; templates.py tells how «…» is read."""

from __future__ import annotations

WORDS = {
    "person": "Marta|Elias|Ingrid|Tomas|Leila|Bruno|Agnes|Kofi|Nora|Pavel|Selma|Dario|Hanna|Rafi|Clara|Anton|Mirela|"
    "Jasper|Ottilie|Sanjay",
    "town": "Brackwell|Lorne|Ostmar|Vellby|Tarnow Hill|Fennick|Aldersea|Quarrow|Mossford|Pellin|Grauwick|Sundrey",
    "building": "windmill|town hall|chapel|bathhouse|railway station|granary|theatre|watchtower|school|brewery|museum|"
    "market hall",
    "job": "gardener|pilot|dentist|librarian|plumber|cook|bus driver|tailor|beekeeper|postman|vet|firefighter|baker|"
    "surgeon",
    "animal": "hedgehog|heron|badger|turtle|dolphin|bat|squirrel|camel|penguin|beaver|walrus|fox|swan|lynx",
    "food": "lentil stew|apple cake|potato salad|mushroom risotto|pancakes|bean chilli|fish pie|onion tart|fried rice|"
    "plum dumplings|pea soup|corn bread",
    "topic": "tides|earthquakes|rainbows|inflation|vaccines|magnets|sleep|compost|the seasons|echoes|yeast|glaciers|"
    "time zones|batteries|elections|recycling",
    "hobby": "knitting|chess|birdwatching|pottery|rowing|photography|baking bread|playing the cello|growing tomatoes|"
    "mending bicycles|juggling|drawing maps",
    "place": "a desert|a harbour|a mountain hut|an old bookshop|a night train|an island|a castle kitchen|a greenhouse|"
    "a railway carriage|a circus tent|a snowed-in village|a lighthouse",
    "object": "telescope|violin|compass|letter|lantern|key|pocket watch|red scarf|map|music box|teapot|suitcase",
    "reader": "a six-year-old|a visitor from abroad|a busy manager|your neighbour|a group of students|an elderly aunt|"
    "a sceptical friend|a class of teenagers",
    "tone": "friendly|formal|cheerful|regretful|firm|grateful|humorous|warm",
    "weekday": "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
    "month": "January|February|March|April|May|June|July|September|October|November",
    "language": "French|Italian|German|Portuguese|Swedish|Dutch|Polish|Turkish",
    "phrase": "thank you very much|where is the station|see you tomorrow|I would like some tea|how much is it|"
    "my name is Anna|the shop is closed|what time is it|happy birthday|I am lost",
    "adjective": "brave|narrow|noisy|honest|heavy|ancient|gentle|famous|clumsy|bright|lazy|smooth|cruel|rare",
    "country": "Norway|Egypt|Peru|Japan|Kenya|Hungary|Canada|Portugal|Vietnam|Chile|Greece|Morocco|Finland|India",
    "fact": "the capital|the currency|a well-known river|a traditional dish|the largest city|a neighbouring country|"
    "the colours of the flag|a famous sight",
    "occasion": "wedding|farewell party|garden party|housewarming|school reunion|book club evening|birthday dinner|"
    "street festival",
    "trip": "hiking trip|city weekend|week at the sea|cycling tour|train journey|canoe trip|skiing holiday|"
    "visit to relatives",
    "rival": "trains and buses|books and films|tea and coffee|cities and villages|summer and winter|"
    "e-mail and letters|gas and electric stoves|swimming and running|owning and renting a home|paper maps and phones",
    "problem": "a dripping tap|a squeaking door|a lost passport|a coffee stain|a flat tyre|a noisy neighbour|"
    "a wilting plant|a foggy mirror|a frozen lock|too many e-mails",
    "goods": "rice, soap, candles and honey|wool, nails, salt and flour|lamps, rope, tea and paper|"
    "shoes, seeds, cheese and pots|brushes, apples, glue and string|cups, towels, pears and matches",
    "verb": "walked|hurried|sailed|cycled|limped|wandered",
    "reason": "a storm|a strike|an illness|a flooded cellar|a missing part|a power cut|a misprint|a late delivery",
    "number": "two|three|four|five",
}

SHORT = {
    "fact": "Name «fact» and «fact.2» of «country».",
    "phrase": "How do you say '«phrase»' in «language», and how in «language.2»?",
    "opposite": "Write one sentence with '«adjective»' and one with its opposite, both about a «animal» and a «job».",
    "job_tools": "Which «number» tools does a «job» need most in «month»?",
    "animal_food": "In one line: what does a «animal» eat in «month», and would it be at home in «country»?",
    "gift": "Think of a small present for a «job» from «country» who likes «hobby».",
    "motto": "Make up a motto for the «building» in «town», which a «job» runs.",
    "rhyme": "Find «number» words that rhyme with '«adjective»' or nearly do, for a verse about a «animal».",
    "yes_no": "Can a «animal» be «adjective» in «month»? Answer briefly.",
    "weekday": "If it is «weekday» in «town», which day will it be there in «9..60» days?",
    "title": "Suggest a title for a novel about a «job», a «object» and a «animal».",
    "side_dish": "What goes well with «food» on a cold «weekday» evening in «month»?",
    "in_words": "Describe «topic» in exactly «number» words for «reader».",
    "greeting": "Write a «tone» greeting of one line to a «job» for a «occasion».",
}

LONG = {
    "summary": "Tell in two sentences what this text is about.\n\nThe «building» of «town» was built by «person», a "
    "«job», after «reason» had ruined the old one. For «12..60» years it stood empty, and only a «animal» lived under "
    "its roof. Then the people of «town.2» bought it for the price of a «object» and opened it every «weekday».",
    "letter": "Write a «tone» letter to a «job» about «problem». Mention that it began last «weekday», and propose a "
    "day in «month» for a visit.",
    "polite": "Put this note more kindly without leaving anything out.\n\n«person»! The «object» you borrowed in "
    "«month» is still not back. I need it on «weekday» for the «occasion». You also broke the «object.2» and never "
    "said a word. Bring both to «town», and do not be late again.",
    "spelling": "Here is a note full of slips. Write it without them.\n\nDear «person», last «weekday» we goes to "
    "«town» and seen a «animal» wich was very «adjective». Their was no body at the «building», so me and «person.2» "
    "has eated our «food» outsid. Tomorow we wants to comes back wiht a «object».",
    "story": "Tell a short story that takes place in «place». A «job» called «person» finds a «object» there, and in "
    "the end it turns out to belong to a «animal».",
    "notes": "Make flowing text out of these points.\n\n- «person», «job» in «town»\n- began with «hobby» at the age "
    "of «14..60»\n- first prize in «month»\n- next show: the old «building», on a «weekday»\n- wants to teach «reader»",
    "explain": "Explain «topic» to «reader». Use a comparison with «hobby», and end with a question to think about.",
    "dialogue": "Write a conversation between a «job» and a «job.2» who meet in «place» and disagree about «topic». "
    "Each should speak at least «number» times.",
    "dates": "List the years in this text, each with what happened.\n\n«town» got its «building» in «1801..1840». In "
    "«1841..1870» «reason» closed it. «person», a «job», reopened it in «1871..1899» with money from «country». Since "
    "«1901..1960» it has belonged to the people of «town.2».",
    "pros_cons": "Compare «rival» for somebody who loves «hobby». Give «number» points for each side and a conclusion.",
    "tense": "Put this passage into the future tense.\n\n«person» «verb» to the «building» on «weekday» morning. The "
    "«object» was heavy, and a «animal» crossed the road. At noon «person.2» brought «food», and they talked about "
    "«topic» until it grew dark.",
    "recipe": "Write a recipe for «food» for «3..12» people who come to a «occasion». List what is needed, then "
    "number the steps.",
    "poem": "Write a poem of «number» verses about a «animal» in «place», in a «tone» mood.",
    "shorten": "Cut this notice down to one sentence that a passer-by can read.\n\nThe «building» in «town» regrets "
    "to say that owing to «reason» it has to stay closed from «weekday» until the «11..28»th of «month». Tickets for "
    "the «occasion» remain valid. Whoever prefers the money may ask «person» at the side door, who is there until six.",
    "alphabet": "Sort these words by their first letter and put each on its own line: «object», «animal», «town», "
    "«food», «building», «job», «hobby», «country».",
    "simpler": "Say this so that «reader» understands it.\n\nIn consequence of «reason», the authorities of «town» "
    "have resolved to relocate the «building» by «20..90» metres. The undertaking, which is to commence in «month», "
    "necessitates the temporary removal of every «animal» that inhabits the premises.",
    "answer_from_text": "Use the sentences of the text to answer.\n\n«person» the «job» lives above the «building» in "
    "«town». Every «weekday» the stall below sells «goods». A «animal» guards the door. In «month» the stall closes, "
    "and the family travels to «country».\n\nWhere does «person» live? What is sold? Who guards the door? When does "
    "it close?",
    "stages": "How does one get started with «hobby»? Describe the first «number» weeks from «month» on for «reader».",
    "email": "Write an e-mail to the «building» in «town». Ask about a «occasion» for «12..90» guests in «month», the "
    "price of «food», and whether a «animal» may come along.",
    "swap_names": "Copy this with «person» in place of «person.2», and in the first person.\n\n«person.2» «verb» to "
    "«town» with a «object» under one arm. Nobody at the «building» had expected anyone before «weekday». So "
    "«person.2» sat down beside the «animal», ate some «food» and waited.",
    "tips": "Give «reader» «number» pieces of advice on how to deal with «problem», each with the reason why it "
    "works, in a «tone» style.",
    "day": "Describe an ordinary «weekday» in «month» in the life of a «job» in «country», from breakfast to bedtime.",
    "table": "Arrange this as a table with a heading for each column.\n\n«person» («18..39») is a «job» and enjoys "
    "«hobby». «person.2» («40..59») works as a «job.2» in «town» and prefers «hobby.2». «person.3», «60..80», from "
    "«town.2», was once a «job.3» and now looks after a «animal».",
    "plan": "Plan a «trip» of «3..9» days to «country» for two people, one of whom is a «job». Give every day a "
    "heading.",
    "continue": "Carry on with this beginning for at least «number» paragraphs, and keep its style.\n\nThe «object» "
    "lay in the snow before the «building» of «town», and no footprints led to it. «person», who had «verb» all "
    "night, thought first of the «animal» and then of «weekday».",
    "speech": "Write a «tone» speech of about «80..180» words for the «occasion» of a «job» who is moving to "
    "«country».",
}
