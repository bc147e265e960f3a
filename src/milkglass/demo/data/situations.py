"""What people write to the message desk of an invented clinic: forty situations a label, and what each is about.

A situation is (message, summary). `[a|b]` offers ways to say it, `{slot}` is filled by `make.py`. Every name, medicine,
place and amount is invented. The last eight situations of each label are only in the test split, so that a model
is asked about things it was not shown.
"""

from __future__ import annotations

Situation = tuple[str, str]

URGENT: tuple[Situation, ...] = (
    (
        "my [father|husband] has had [a tight chest|pressure in the chest] since {time} and [his left arm feels "
        "numb|it spreads to the jaw|is sweating a lot]",
        "chest pressure since {time}",
    ),
    (
        "{child} ({age}) [swallowed|may have eaten] [half a strip|a handful] of {med} [while I was in the "
        "garden|before I could stop it]",
        "{child}, {age}, may have swallowed {med}",
    ),
    (
        "I took {med} twice by [mistake|accident] [this morning|an hour ago] and now [the room spins|I feel "
        "faint|my heart races]",
        "took {med} twice, feels unwell",
    ),
    (
        "the wound [from Dr {doctor}'s operation|on my knee] [opened again|is wide open] and [the bandage is "
        "soaked through|it won't stop bleeding]",
        "wound open again and bleeding",
    ),
    (
        "{name}, {age} weeks after the birth, [soaks a pad every half hour|is bleeding heavily] and [looks very "
        "pale|says she sees spots]",
        "{name} bleeds heavily after birth",
    ),
    (
        "since the first tablet of {med} my lips [are swollen|keep swelling] and [swallowing gets harder|I have "
        "hives on both arms]",
        "swelling after {med}, maybe allergy",
    ),
    (
        "our baby has [{fever} degrees|a fever of {fever}] and [hasn't had a wet nappy since last night|will not "
        "wake up properly for a feed]",
        "baby with fever of {fever}, drowsy",
    ),
    (
        "grandma {last} [slipped on the steps at {place}|fell out of bed], [cannot put weight on her hip|one leg "
        "looks shorter than the other]",
        "fall at home, hip may be broken",
    ),
    (
        "[suddenly|since breakfast] {name} [speaks as if drunk|can't find words], and [one corner of the mouth "
        "droops|drops whatever is in the right hand]",
        "{name}: speech trouble, maybe stroke",
    ),
    (
        "[his|her] sugar reads {sugar} and won't come down, [breath smells of apples|has been sick four times], "
        "the pump [shows an error|was changed yesterday]",
        "sugar at {sugar}, vomiting",
    ),
    (
        "the blue inhaler [does nothing any more|is empty], {child} [can only say two words at a time|is pulling "
        "in the ribs with each breath]",
        "{child}: asthma attack, inhaler fails",
    ),
    (
        "I can see only half of the picture with my right eye [since I got up|all of a sudden], [like a "
        "curtain|with flashes at the edge]",
        "sudden loss of sight in one eye",
    ),
    (
        "a colleague from the [paint shop|bakery] at {place} got [cleaner|lye] in both eyes, [we are rinsing "
        "but|and] he [cannot open them|screams with pain]",
        "chemical splash in both eyes",
    ),
    (
        "my calf is [hot, red and thick|twice as thick as the other] after the long flight and [now breathing in "
        "hurts|since {time} I am short of breath]",
        "swollen calf and short breath",
    ),
    (
        "{name} [says that nothing makes sense any more|wrote that everybody is better off alone] and [took the "
        "car keys|has put aside the whole box of {med}]",
        "{name} may harm themselves",
    ),
    (
        "a wasp stung [me|my son] in the throat [at the lake in {place}|ten minutes ago] and the voice [is "
        "getting hoarse|sounds strange]",
        "wasp sting in the throat",
    ),
    (
        "[vomiting what looks like coffee grounds|black stools] since {day}, and {first} [is dizzy on "
        "standing|collapsed in the bathroom], takes {med}",
        "{first}: signs of internal bleeding",
    ),
    (
        "I am {age} weeks pregnant and [have not felt the baby move since {day}|have a blinding headache and see "
        "stars], [what do I do now|please tell me where to go]",
        "pregnant, week {age}, alarming signs",
    ),
    (
        "our neighbour's dog bit {child} in the [cheek|hand], [the cut is deep and gapes|I can see something "
        "white in it]",
        "deep dog bite, {child}",
    ),
    (
        "the tube in [his|dad's] stomach [came out|was pulled out in the night] and [the hole is closing|nothing "
        "goes in], next {med} is due at {time}",
        "feeding tube out, {med} due",
    ),
    (
        "she had a fit of [six|almost ten] minutes, [a second one began just now|still isn't awake], never had "
        "one before",
        "first seizure, longer than five minutes",
    ),
    (
        "boiling [soup|oil] ran over {first}'s [chest and arm|thighs], skin [comes off in sheets|is white in the "
        "middle]",
        "{first}: large burn",
    ),
    (
        "the leg in the cast from {day} [is ice cold and blue at the toes|hurts more with each hour and the toes "
        "are numb]",
        "cast too tight, cold toes",
    ),
    (
        "after the {med} drip at your day ward [I shake all over|my temperature jumped to {fever}], and [I'm on "
        "chemo|my white cells were low on {day}]",
        "fever during chemotherapy",
    ),
    (
        "[terrible|unbearable] pain in the right side of the belly, [he walks bent over|lying still is the only "
        "thing that helps], [thrown up since {time}|no appetite and {fever} degrees]",
        "belly pain, maybe appendix",
    ),
    (
        "{name} [hit the curb with the bicycle|took a ball to the head], [keeps asking the same question|one "
        "pupil is larger] and is getting sleepy",
        "{name}: head injury, confused",
    ),
    (
        "my heart [jumps and stumbles|has raced at 170] for [two hours|the whole night] and {med} [didn't "
        "help|makes no difference], I nearly passed out",
        "fast irregular heartbeat",
    ),
    (
        "[haven't been able to pee|no urine at all] since {day} evening, [the belly is hard as a board|the pain "
        "comes in waves], and I have the catheter from Dr {doctor}",
        "cannot pass urine",
    ),
    (
        "my testicle [hurts so much that I threw up|swelled within an hour], I am {age} and [it began in my "
        "sleep|it started after training]",
        "sudden testicular pain",
    ),
    (
        "numb between the legs, [both feet are weak|can't feel when I go to the toilet] since [lifting crates|the "
        "back pain got worse on {day}]",
        "back pain with numbness, nerve at risk",
    ),
    (
        "[red streaks run|a red line goes] up my arm from the cut that Dr {doctor} stitched, I have "
        "[shivers|{fever} degrees]",
        "infection spreads from a cut",
    ),
    (
        "please ring back at once on {phone}: she mixed up the boxes and [injected {dose} instead of|drew up ten "
        "times the dose of] {med}",
        "wrong dose of {med} injected",
    ),
    # --- only in the test split ---
    (
        "a fishbone [got stuck|sits in the throat] at lunch, {first} [drools and can't swallow water|coughs and "
        "turns blue now and then]",
        "{first}: bone stuck in the throat",
    ),
    (
        "the gas alarm [went off at {place}|rang in the cellar], all four of us [have headaches and feel sick|are "
        "drowsy], [are we poisoned|should we come in]",
        "carbon monoxide suspected",
    ),
    (
        "he is {age}, stiff neck, [light hurts his eyes|can't bring chin to chest], [purple spots on the "
        "legs|spots that don't fade under a glass]",
        "stiff neck and spots, maybe meningitis",
    ),
    (
        "blood [sprays|keeps running] from the nose for [forty minutes|over an hour] although we press, and he "
        "takes {med} to thin it",
        "nosebleed that won't stop, on {med}",
    ),
    (
        "mum is [confused since {time}|talking to people who aren't there], [hot and breathing fast|hardly "
        "reacts], the urine smelled bad all week",
        "sudden confusion with fever",
    ),
    (
        "the saw took the tip of my [thumb|finger] off, [it's in a bag with ice|my wife holds a towel on it], "
        "[{place} workshop|phone {phone}]",
        "fingertip cut off",
    ),
    (
        "[after the heat on the field|since the race] {name} [stopped sweating and talks nonsense|has {fever} "
        "degrees and staggers]",
        "{name}: heat stroke",
    ),
    (
        "{child} put a [button battery|magnet] into the [nose|mouth] and [it's gone|I think it was swallowed], "
        "what should I do this minute",
        "{child} may have swallowed a battery",
    ),
)

APPOINTMENT: tuple[Situation, ...] = (
    (
        "[could I move|I need to shift] my check-up with Dr {doctor} from {day} to [the week after|any morning], "
        "[a shift at work came up|the school has a concert]",
        "move the check-up with Dr {doctor}",
    ),
    (
        "is there [a free slot|anything free] for a [flu shot|travel jab] before {date}, {first} and I could "
        "[both come at once|come at lunchtime]",
        "vaccination before {date}",
    ),
    (
        "I'd like to [book|arrange] the yearly [skin|heart] check, my last one was [two springs ago|on {date}], "
        "[mornings are best|not on a {day}]",
        "book the yearly check",
    ),
    (
        "[please cancel|we have to call off] {child}'s hearing test on {day}, [he has chickenpox|the class trip "
        "is that day], when is the next one",
        "cancel and rebook {child}'s hearing test",
    ),
    (
        "does Dr {doctor} [see patients|hold hours] at {place} [on Saturdays|in the evening], [my chest pain "
        "check|the blood pressure talk] isn't urgent",
        "asks for evening hours at {place}",
    ),
    (
        "my repeat prescription of {med} [runs out on {date}|lasts until {day}], can I [pick it up|have it ready] "
        "without seeing anyone",
        "repeat prescription of {med}",
    ),
    (
        "[need|looking for] a first visit for my daughter, {age} weeks, [we just moved to {place}|our old doctor "
        "retired], do you take new patients",
        "new patient, baby of {age} weeks",
    ),
    (
        "the letter says [to fast|nothing to eat] before {day}'s blood draw, [does that include {med}|may I drink "
        "black coffee], and is {time} still right",
        "question on fasting before blood draw",
    ),
    (
        "[I missed|sorry that I didn't come to] the physio on {day}, [the bus broke down|I mixed up the weeks], "
        "can the series [be extended|start again]",
        "missed physiotherapy, wants a new date",
    ),
    (
        "can the talk about my [scan|biopsy] results be by [phone|video], {place} is [an hour away|hard to reach "
        "without a car]",
        "wants results by phone",
    ),
    (
        "who [looks after|stands in for] Dr {doctor}'s patients during the holidays until {date}, the stitches "
        "must come out [around {day}|then]",
        "stitches out while Dr {doctor} is away",
    ),
    (
        "[I would like|may I have] a woman doctor for the smear test, [{day} afternoon|any day after {time}] "
        "works, under the name {name}",
        "smear test with a woman doctor",
    ),
    (
        "we need a [sports|school] certificate for {child}, the form [has to be in by {date}|came yesterday], [is "
        "that a long visit|who signs it]",
        "certificate for {child} by {date}",
    ),
    (
        "the reminder [says {time}|text has {day}] but my card says [half past|another day], which one [is "
        "right|should I believe]",
        "two times given for one visit",
    ),
    (
        "I'm [three|four] months after the hip operation and [all is well|walk without sticks], when does Dr "
        "{doctor} want [the last x-ray|to see me]",
        "check after hip operation",
    ),
    (
        "please put me on the waiting list for the [sleep|allergy] clinic, I [can come at short notice|live next "
        "door], phone {phone}",
        "waiting list of the clinic",
    ),
    (
        "[could someone|is it possible to] bring an interpreter for [Ukrainian|sign language] on {day}, it's the "
        "[diabetes lesson|second talk] for {name}",
        "interpreter for {name} on {day}",
    ),
    (
        "my [mother|aunt] is in a wheelchair, is the [entrance at {place}|room on the first floor] "
        "[step-free|reachable by lift] for the visit on {day}",
        "wheelchair access on {day}",
    ),
    (
        "[how long|how many minutes] should I plan for the stress test, I [have to collect {child} at {time}|take "
        "the train at {time}]",
        "length of the stress test",
    ),
    (
        "the nurse said to come back in [ten|six] weeks for the second [hepatitis|tick] shot, [nobody gave me a "
        "time|that would be {date}]",
        "second vaccination is due",
    ),
    (
        "[thanks|thank you] for yesterday, {med} [agrees with me|works well], so do I still need the visit on {day}",
        "doing well on {med}, needs the visit?",
    ),
    (
        "our two boys, {child} and his brother, need [eye tests|dental checks], [back to back|in the same half "
        "hour] if you can, [from {date} on|not Wednesdays]",
        "two children, tests back to back",
    ),
    (
        "I [changed my number|have a new phone], it is {phone} now, please [use it for the reminder|note it] for "
        "{day} {time}",
        "new phone number for reminders",
    ),
    (
        "can I see the same [midwife|dietician] as on {date}, I [liked her very much|believe her name was "
        "{last}], [no hurry|whenever it suits]",
        "wants the same person as before",
    ),
    (
        "[may my partner come along|can I bring somebody] to the ultrasound on {day}, and [is there parking|where "
        "do we wait] at {place}",
        "partner at the ultrasound",
    ),
    (
        "Dr {doctor} wanted [a fresh blood test|my pressure taken] four weeks into {med}, that's [{date}|next "
        "{day}], which [hour|room] please",
        "blood test after four weeks of {med}",
    ),
    (
        "I am [off work with|getting over] a cold and should [not sit|rather not be] in the waiting room, can "
        "{day}'s talk [wait a week|be moved]",
        "has a cold, wants to postpone",
    ),
    (
        "the online calendar [shows nothing before {date}|crashes when I choose {day}], can you [book it by "
        "hand|look whether {time} is free]",
        "online booking does not work",
    ),
    (
        "do I need a [referral|letter] from {place} for the [knee|stomach] specialist, or [may I book straight "
        "away|is calling you enough]",
        "is a referral needed",
    ),
    (
        "{name} moves into the home in {place}, [do you visit there|who makes the rounds], [the first time would "
        "be {date}|Thursdays would suit the staff]",
        "home visits in {place}",
    ),
    (
        "I would like a second opinion on the [shoulder|cataract] operation, [no pain at present|it can wait "
        "until {date}], does anybody [besides Dr {doctor}|else] do that",
        "second opinion on an operation",
    ),
    (
        "[kindly confirm|please write back whether] {day} at {time} stands, [I booked by voice mail|the line was "
        "bad], {name}",
        "confirm {day} at {time}",
    ),
    # --- only in the test split ---
    (
        "we're abroad until {date}, [can the cast come off|is it fine to change the bandage] [a few days "
        "later|the {day} after], it doesn't hurt",
        "cast removal after {date}",
    ),
    (
        "I'd prefer [somebody who speaks Portuguese|the later slot], otherwise the [memory test|lung test] on "
        "{day} [is fine|suits us]",
        "wishes for the test on {day}",
    ),
    (
        "[which documents|what] should I bring to the first [pain clinic|fertility] visit, [old scans from "
        "{place}|the list with {med}] perhaps",
        "what to bring to the first visit",
    ),
    (
        "the [two-year|nine-month] check for {child} [is due|should be soon], {time} [clashes with his nap|would "
        "be perfect], what have you got",
        "child check for {child}",
    ),
    (
        "[swap|change] me with my wife on {day} if that's easy: she [takes my {time}|needs longer] and I come "
        "[later|the next day]",
        "swap visits with his wife",
    ),
    (
        "will Dr {doctor} still be [in {place}|with you] after {date}, I [hope to stay|want to remain] her "
        "patient for the thyroid controls",
        "stay with Dr {doctor} after {date}",
    ),
    (
        "could the [nurse|assistant] show {first} how to use the {med} pen, [ten minutes would do|before {date}], "
        "we [are at home all week|can drop in]",
        "lesson for the {med} pen",
    ),
    (
        "my ear feels [blocked|full] again like last year, [not painful|no fever], can somebody rinse it [this "
        "week|on {day}]",
        "ear rinse, not painful",
    ),
)

BILLING: tuple[Situation, ...] = (
    (
        "invoice {ref} [asks for|says] {amount} but I [paid at the desk|gave my card] on {day}, please "
        "[check|look into it]",
        "{amount} charged again, ref {ref}",
    ),
    (
        "my insurer [refused|sent back] {amount} for the [scan|blood work] because the code [is missing|doesn't "
        "match], can you [correct it|send a new one]",
        "insurer refused {amount}, wrong code",
    ),
    (
        "[could I pay|is it possible to settle] {amount} in [three|five] parts, [the salary comes late|I lost "
        "hours at work], reference {ref}",
        "wants to pay {amount} in parts",
    ),
    (
        "why is there a no-show fee of {amount}, I [called the day before|cancelled by text] and {first} at the "
        "desk [confirmed|noted it]",
        "disputes a no-show fee of {amount}",
    ),
    (
        "please send the receipt for {date} [for my tax return|to my employer], [the one I have is unreadable|I "
        "lost mine]",
        "receipt for {date}",
    ),
    (
        "we changed [insurance|our health fund] on {date}, the new number is {ref}, [do you need a copy|must the "
        "last claim be redone]",
        "new insurance since {date}",
    ),
    (
        "[a debt collector|a lawyer] wrote about {amount} that I [never heard of|paid long ago], the letter "
        "[gives|mentions] {ref}",
        "collector asks for {amount}",
    ),
    (
        "what [would|does] the emergency visit on {day} cost me, the leaflet [said|names] {amount}, my plan "
        "covers [only half|sixty percent]",
        "cost of the visit on {day}",
    ),
    (
        "the bill lists [two|three] hours of [anaesthesia|physio], it was [forty minutes|one], so {amount} [can't "
        "be right|is too much]",
        "too many hours on the bill",
    ),
    (
        "[you took|my bank shows] {amount} twice on {date}, [please refund one|when does it come back]",
        "{amount} taken twice on {date}",
    ),
    (
        "the pharmacy at {place} wants {amount} for {med}, [last month it was free|I thought it was covered], who "
        "[changed|decides] that",
        "price of {med}",
    ),
    (
        "my daughter {first} is [under eighteen|on my policy], why [did the invoice go|is the reminder addressed] "
        "to her, {ref}",
        "invoice sent to a minor",
    ),
    (
        "kindly [issue|make out] the invoice to {place} [council|school], they [bear|take over] the cost of "
        "{name}'s [jab|check]",
        "invoice should go to {place}",
    ),
    (
        "I've [waited six weeks|heard nothing since {date}] for the [refund|credit] of {amount}, the "
        "[chest|heart] exam never took place",
        "refund of {amount} is late",
    ),
    (
        "does the {amount} for the [private room|wig] [count|go] toward the deductible, my fund says [ask the "
        "clinic|it needs a stamp]",
        "does {amount} count to the deductible",
    ),
    (
        "[reminder|second notice] {ref} came although [the invoice never did|we moved on {date}], I won't pay the "
        "late fee of {amount}",
        "late fee without an invoice",
    ),
    (
        "can I get an estimate in writing for the [knee|tooth] operation with Dr {doctor}, [the bank|my union] "
        "wants it before {date}",
        "written estimate for an operation",
    ),
    (
        "the amount on the [app|website] is {amount}, on paper it is [less|higher], which [do I transfer|is "
        "true], {ref}",
        "two amounts for {ref}",
    ),
    (
        "please [stop|end] the direct debit for the [rehab gym|diet course], I [left|quit] on {date}, still "
        "{amount} goes each month",
        "stop the monthly {amount}",
    ),
    (
        "I [got|received] a bill of somebody called {name}, that's [not me|a stranger], the [street|birthday] is "
        "wrong too",
        "bill of another person",
    ),
    (
        "as [a student|a pensioner] I [should be free of|don't have to pay] the fee, the card [is attached|was "
        "shown to {first}], still {amount} is due",
        "should be free of the fee",
    ),
    (
        "[ambulance|transport] from {place} on {day}: {amount}, [my fund asks for the doctor's note|who fills in "
        "the form]",
        "ambulance bill of {amount}",
    ),
    (
        "Dr {doctor} said the wart removal [is included|costs nothing], [now I read|the statement says] {amount} "
        '"cosmetic"',
        "{amount} for what was said to be free",
    ),
    (
        "I sent {amount} with the wrong [reference|number], it [should be|belongs to] {ref}, name {name}",
        "payment with a wrong reference",
    ),
    (
        "the travel insurance needs [an itemised bill|the invoice in English] for the fall in {place}, [the cast "
        "and the x-ray|all of {date}]",
        "itemised bill for travel insurance",
    ),
    (
        "[may I ask|I wonder] why the same {med} drip cost {amount} on {day} and [nearly double|a third less] the "
        "week after",
        "price of the {med} drip differs",
    ),
    (
        "my late husband's account [{ref}|with you] [shows|still has] a credit of {amount}, how do I [claim "
        "it|get it paid out]",
        "credit of a late patient",
    ),
    (
        "the card reader at {place} [failed|said declined] on {day}, I [left my address|promised to transfer], "
        "where's the bill",
        "could not pay by card on {day}",
    ),
    (
        "accident at work on {date}: [my employer's insurer|the works office] pays, so please [cancel|take back] "
        "the {amount} in my name",
        "work accident, other payer",
    ),
    (
        "is there a [discount|cash price] if I pay the {amount} for the [lenses|implant] [at once|before {date}]",
        "discount for paying at once",
    ),
    (
        "the lab [in {place}|you use] bills me {amount} on its own, [is that part of your invoice|do I pay both], "
        "{ref}",
        "separate bill of the laboratory",
    ),
    (
        "[need|we ask for] a copy of everything paid for {child} in the last year, the [court|benefits office] "
        "wants it [by {date}|soon]",
        "list of payments for {child}",
    ),
    # --- only in the test split ---
    (
        "your [transfer form|QR code] has an account that my bank [rejects|calls closed], how do I pay {amount} "
        "[before the fine|by {date}]",
        "account number is rejected",
    ),
    (
        "I was told [the co-payment|my share] is capped, [yet|but] this year it adds up to {amount} with {med} "
        "and the [nights on the ward|visits]",
        "co-payment above the cap",
    ),
    (
        "the doctor's letter of [half a page|ten lines] is charged with {amount}, [nobody told me|I asked for "
        "none], take it off please",
        "charged for a letter",
    ),
    (
        "[half of the|the whole] claim {ref} went to the wrong [fund|company], mine is the one in {place} since {date}",
        "claim {ref} went to a wrong fund",
    ),
    (
        "will you [accept|take] a [voucher|cheque] from the {place} charity for {name}'s hearing aid, it's {amount}",
        "paying with a charity voucher",
    ),
    (
        "{amount} for the night of the seizure seems [a lot|high], [could someone explain the lines|which part "
        "was the ambulance]",
        "explain the bill of the night",
    ),
    (
        "I'd rather get [paper|e-mail] statements, and the last one [{ref}|from {date}] [lists VAT|is without my "
        "tax number]",
        "form of the statements",
    ),
    (
        "my [ex-husband|mother] used to pay for {child}, from {date} [it's me|send it to me], also the open {amount}",
        "change of payer for {child}",
    ),
)

SITUATIONS: dict[str, tuple[Situation, ...]] = {"urgent": URGENT, "appointment": APPOINTMENT, "billing": BILLING}
HELD_OUT = 8  # of each label, the last ones
