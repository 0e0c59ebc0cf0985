"""Short texts, written for this corpus, that prompts ask to summarise or rewrite. Everything in them is invented."""


def unwrapped(texts: dict[str, str]) -> dict[str, str]:
    """The texts with each on a single line."""
    return {title: " ".join(text.split()) for title, text in texts.items()}


PASSAGES = unwrapped(
    {
        "the library van": """
            The library van of Harrow Fell makes its round every second Thursday. It leaves the depot at eight,
            climbs the old quarry road and stops at eleven hamlets before dark. The driver, Mara Okafor, carries
            about two thousand books, a box of large-print novels and a small printer that people use for tax forms.
            Last winter the council wanted to end the service, because a trip costs nearly four hundred pounds and
            fewer than sixty people come aboard. The hamlets answered with a petition, and a farmer offered to park
            the van in his barn for free. The council agreed to one more year. Since then Mara has kept a tally of
            every visit, and she has begun to take orders by telephone, so that nobody climbs the steps only to find
            the book gone.
        """,
        "the school garden": """
            Two years ago the yard behind Linden Street School was a square of cracked asphalt. A parent who worked
            for a paving company lifted the slabs over a weekend, and the fifth class drew a plan with six beds, a
            pond no larger than a bathtub and a hedge of currants. The first summer failed: the soil was thin, the
            pond leaked, and snails ate the lettuce in a night. In the second spring the children mixed compost from
            the canteen into the beds and gave each bed to one class. Now there are beans, marigolds and a pumpkin
            that is weighed every Friday. The teachers use the garden for lessons on measuring, weather and
            patience. The canteen buys the herbs at a fair price, and the money pays for seeds.
        """,
        "the river ferry": """
            For ninety years a small ferry has crossed the Tarn at Ostwick. It has no engine: a steel cable holds
            it, and the current pushes it from one bank to the other when the ferryman turns the rudder. A crossing
            takes four minutes. In dry summers the river is too slow, and the ferry rests for weeks. Engineers have
            proposed an electric motor for such days, but the owners fear that it would scare the otters and spoil
            the quiet that visitors come for. A compromise is being tried this year. A motor the size of a suitcase
            hangs at the stern and may run only when the water falls below a painted mark. So far it has been used
            on nine days, and nobody has complained except an angler.
        """,
        "the night bakery": """
            The bakery on Canal Street opens at ten in the evening and closes at six in the morning. Its customers
            are nurses, taxi drivers, students and people who cannot sleep. Jonas Weil, who owns it, used to run an
            ordinary shop, yet he could not compete with the supermarket across the road. He noticed that the only
            hours without competition were the dark ones. He now sells fewer kinds of bread, nine instead of thirty,
            and throws away almost nothing, because what is left at six goes to two hotels nearby. The rent is low,
            since the building is damp. What worries him is staff: few bakers want to greet customers at three in
            the morning, and the last two left within a year to have children and to see the sun.
        """,
        "the clock tower": """
            The clock of Venn has four faces, and for a century no two of them agreed. Visitors laughed, and locals
            learned which face to trust: the north one for trains, the east one for school. In May a retired
            watchmaker named Ilse Brandt asked for the key. She found that the wind pressed on the long hands of the
            west face, that pigeons had nested behind the south dial and that a gear was a tooth short. It took her
            eleven weeks, mostly on a ladder, to mend it all. When the four faces at last showed the same time, some
            people were sad. The school had to change its bell by three minutes. The mayor offered Ilse a medal, but
            she asked for a wire screen against the pigeons.
        """,
        "the bicycle workshop": """
            Every Saturday volunteers repair bicycles in the cellar of the town hall in Brey. Anyone may bring a
            broken bicycle, but nobody may leave it there: the owner has to hold the wrench. The rule was made after
            the first month, when forty bicycles stood in the cellar and three volunteers nearly gave up. Now a
            helper explains, points and checks, and the owner does the work. Most repairs are flat tyres, loose
            brakes and rusty chains. Tools are free; spare parts cost what they cost the workshop. A jar at the door
            collects gifts, about ninety euros a week, which pays for oil, patches and coffee. Some who came with a
            flat tyre a year ago are helpers today.
        """,
        "the weather station": """
            On the roof of the fire station in Kell stands a white box on legs. Inside are a thermometer, a wet
            thermometer and a paper drum that turns once a week. The firefighters have written down the readings
            every morning since 1931, through two floods and a war, and only nine days are missing. A university has
            now scanned the books. The numbers show that the frost ends sixteen days sooner than it did, and that
            rain comes less often but harder. The university offered an automatic station, which would send a
            reading each minute. The firefighters took it, but they still climb the stairs at seven. The new
            station, they say, was silent for three days in August, and the pencil was not.
        """,
        "the lost luggage office": """
            Around six hundred things are left on the trams of Morrow each month. They end up in a long room under
            the depot, where two clerks sort them by day and by line. Umbrellas are the most common find, then
            single gloves, then bags of shopping. There was once a tuba. A thing is kept for ninety days. Telephones
            and wallets go back to their owners in most cases, because they can be traced, while only one umbrella
            in twelve is claimed. What nobody claims is sold on the first Saturday of the month, and the money goes
            to the pension fund. One of the clerks, Petra, keeps a notebook of the best explanations. Her favourite
            is the man who had lost his suitcase because the tram was too comfortable.
        """,
        "the island school": """
            There are seven pupils in the school on Skarrow, an island that can be walked around in two hours. They
            are between five and twelve years old and share one room, one stove and one teacher. The older ones
            explain fractions to the younger ones, and in return the younger ones carry the wood. Twice a week a
            class on the mainland joins them by video for music, which works when the wind is low. The ministry
            would like to close any school with fewer than ten pupils. The island's parents argue that a family with
            children will not move to a place without a school, so that to close it would also close the shop, the
            ferry and in the end the island. A decision is due in March.
        """,
        "the repair of the organ": """
            When the organ of Saint Oda was opened last spring, mice had eaten the leather of a hundred and forty
            valves. The parish collected money for two years, and an organ builder from Lund took the pipes away in
            straw. In the workshop he found newspapers from 1884 glued inside the wind chest, and a note from an
            apprentice who complained about the cold. The builder left both where they were and added a note of his
            own. New valves are covered in sheepskin, and a fine metal mesh should keep mice away. The first concert
            is planned for the autumn. The organist has asked the congregation to be patient, as the pipes need some
            months in the church before they hold their tune.
        """,
        "the shared car": """
            Nineteen households in Plum Lane own a car together. It is a grey estate with a dent, and it stands
            below the big walnut tree. Whoever needs it writes a name into a calendar on the internet and takes the
            key from a box with a code. A kilometre costs thirty cents, and the money pays for fuel, insurance and
            the next car. In the first year there were quarrels about crumbs, dog hair and an empty tank. A short
            list of rules now hangs from the mirror: leave it as you would like to find it, fill it below a quarter,
            and report each scratch. On average the car is in use for six hours a day. Eleven of the households have
            sold their own, and the children play where those used to stand.
        """,
        "the seed bank": """
            In the cellar of a former brewery the seed bank of Dorn keeps four thousand kinds of vegetables. The
            seeds lie in paper bags inside steel cupboards at six degrees. Every kind has to be sown again at least
            once in eight years, or it will no longer sprout, so gardeners all over the country take a bag home,
            grow the plants, and send back twice the number of seeds. Last year a pale yellow bean that was thought
            to be lost came in an envelope without a sender. The bank has three employees and three hundred
            gardeners. Its largest worry is not money but crossing: if two kinds of squash bloom in neighbouring
            gardens, the bees mix them, and the old kind is gone.
        """,
        "the quiet carriage": """
            The railway of the Eastern Hills marked one carriage of each train as quiet. No telephone calls, no
            music, no loud talk. In the first survey, seven in ten passengers praised it. In the second, a year
            later, only four did, although the rules were the same. The railway asked why. Passengers said that they
            now noticed each rustle of a paper bag, and that they were cross with people who whispered. A
            psychologist who was asked for advice suggested to call it the calm carriage instead, and to allow
            short, soft talk. Complaints fell by half within three months. The seats, the walls and the people were
            the same as before; only the word on the door had changed.
        """,
        "the mountain hut": """
            The Gray Saddle hut lies at 2,300 metres and can only be reached on foot. All that its guests eat is
            carried up by mule, and all that they leave is carried down. Lena and Tom have run it for fourteen
            summers. They have forty beds, two toilets and a stove that also heats the water. In July they turn
            people away each night. They could build more beds, but the spring gives only nine hundred litres a day,
            and there is no other water. Instead they ask each guest to stay for two nights at most and to book
            before coming. A shower costs five euros and lasts for three minutes. Most guests do without, says Lena,
            and nobody has ever smelled better for complaining.
        """,
        "the puppet theatre": """
            The puppet theatre in Sable Court has forty-eight seats, all of them too small for adults. It was
            founded by two sisters who had inherited a trunk of puppets and no money. They play three pieces a week,
            build the scenery from cardboard and pay themselves last. During the long closure two winters ago they
            sent a puppet by post to any child who wrote a letter, and more than a thousand letters came. Many of
            those children now sit in the small seats. The sisters have begun to teach a course in carving, which
            brings in more than the tickets do. They have one plan that they will not give up: a piece without
            words, so that children who have just come to the country can laugh at the same time as the others.
        """,
        "the new roundabout": """
            The crossing of Mill Road and the ring road used to have traffic lights and, on average, eleven
            accidents with injuries a year. In April the city replaced the lights with a roundabout. In the six
            months since, there have been two accidents, neither of them serious. Drivers wait eighteen seconds on
            average, down from fifty. Cyclists are less happy. The lane for them ends at the edge of the circle, and
            many get off and push. The city has promised a tunnel, which would cost 1.4 million, or a crossing with
            priority for bicycles, which would cost sixty thousand but slow the cars. A vote is planned for
            December. The school nearby has asked for the cheaper plan, because it could be finished before the
            summer.
        """,
        "the tea house": """
            The tea house on the pier serves only one thing at a time. On Monday it is black tea with milk, on
            Tuesday green tea, on Wednesday an infusion of mint from the roof, and so on. People who come on the
            wrong day drink what there is, or they come back. The owner, Mr. Asano, explains that choice makes
            guests nervous and that nobody talks while reading a menu. He used to offer sixty teas and remembers
            long silences. Now the tables are loud. Business is not better than before, but it is not worse, and he
            needs only one supplier a day. On the last day of each month the guests may vote for the tea of the next
            month's Sunday. The vote is usually close and always taken seriously.
        """,
        "the flooded archive": """
            A pipe burst above the archive of the port on the second of February, and by morning three shelves of
            ship lists stood in water. The archivists did what they had practised: they packed the wet volumes in
            plastic, drove them to a fish factory and froze them. Frozen paper does not rot. Over the next year the
            volumes will be dried in a vacuum, about forty at a time, which turns the ice to vapour without making
            the ink run. Five volumes are lost, because they had been bound in leather that shrank. The port has
            since moved the pipes. It has also agreed to photograph the lists, something the archivists had asked
            for in each of the nine years before. The fish factory did not send a bill.
        """,
        "the silent alarm": """
            At the nursing home of Elm Court the call buttons used to ring in the corridor, day and night. Residents
            slept badly, and nurses no longer heard the bells because there were so many. In January the home gave
            each nurse a small device that buzzes in the pocket and shows the room number. The corridor is quiet
            now. The time until a nurse comes has fallen from six minutes to under three. There were problems at
            first: batteries ran out, and two devices went through the laundry. The home bought a charging shelf and
            spare devices. Residents report that they sleep better, and fewer of them ask for sleeping pills. One
            resident, a former conductor, says that he misses the bells, because he had begun to hear a melody in
            them.
        """,
        "the honest shop": """
            On the road to Pell stands a wooden hut without a door. Inside are eggs, apples, jam, onions and a tin
            with a slit. There is no seller. A board lists the prices, and a notebook is there for those who want to
            write down a debt. The farm that owns the hut counts the money each evening. Over the last year the tin
            held ninety-four percent of what should have been in it. The farmer is content, since a seller would
            cost far more than six percent. Theft is rare; mistakes are common, and they go in both directions. Once
            the tin was broken open, and forty euros were gone. The next day there was a note under the jam, with
            fifty euros and the words: bad week, sorry.
        """,
    }
)

MESSAGES = unwrapped(
    {
        "late delivery": """
            hi, i ordered a desk from you three weeks ago and it still isn't here. your website says it was
            delivered but that's just wrong. i've called twice and nobody calls me back. i want my desk or my money,
            and i want it this week.
        """,
        "missed meeting": """
            Sorry I wasn't there this morning, the train stood still for an hour and my phone was dead. I read the
            notes. I can do the budget part by Friday but not the slides, somebody else has to take those.
        """,
        "noisy neighbour": """
            Your music was so loud again last night that my kids couldn't sleep. This is the third time this month.
            Next time I will not ring the bell, I will call the landlord.
        """,
        "cake order": """
            we need a cake for saturday, it's my dad's 70th birthday, about 20 people, no nuts because of my sister,
            and he loves lemon. can you do that and what would it cost and when can i pick it up
        """,
        "broken heating": """
            The heating in our flat has been off since Sunday. It's 14 degrees in the living room. We told the
            caretaker and he said he'd look, but he hasn't come. We have a baby. Please send somebody today.
        """,
        "team news": """
            Big news!!! We won the contract with the Lowell hospital, it's the biggest one we ever had, and it was
            super close. Everyone worked like mad. Pizza on Thursday at noon in the kitchen, be there!
        """,
        "price increase": """
            As of the first of next month our prices go up by four percent. Materials have become expensive and we
            can't carry that alone any more. Old orders keep the old price. If you have questions, ask your contact
            person.
        """,
        "lost keys": """
            I think I left my keys in your waiting room on Tuesday. They're on a red ribbon with a small wooden
            fish. Could you have a look under the chairs near the window? I can come by any time after four.
        """,
        "holiday request": """
            I'd like to take off the last two weeks of August. I know that's when Sam is away too, but I've talked
            to Nadia and she can cover the phones. Please let me know soon, because the flights get more expensive
            every day.
        """,
        "server outage": """
            The website was down from 9:12 to 10:47 today. A disk was full because the logs were not rotated. We
            deleted old logs and restarted the service. We will add an alarm for disk space and rotate the logs
            daily.
        """,
        "choir concert": """
            Our choir sings on Sunday at five in the old town hall. There's no entrance fee, but we collect for the
            new piano. Bring your children, bring your neighbours, and bring a cushion because the chairs are hard.
        """,
        "wrong invoice": """
            You billed us for twelve printers. We bought ten. Also the address is wrong again, we moved in March.
            Please send a correct invoice, otherwise we can't pay.
        """,
        "training plan": """
            From Monday all new staff get two days of training before they go on the floor. Day one is safety and
            the till, day two is the warehouse. Bring solid shoes. Lunch is paid for.
        """,
        "garden party": """
            It's summer, finally! We're having people over on the 12th, from three until the mosquitoes come.
            There'll be sausages, salad and a paddling pool. Bring something to drink and a towel. Tell us if you're
            coming so we buy enough bread.
        """,
        "feedback on a draft": """
            I read your draft. The beginning is good but then it goes on and on and I lost the thread around page
            four. Cut the history part. Your numbers in the table don't add up to a hundred. The ending is great.
        """,
        "gym contract": """
            I want to end my contract because I'm moving to another town in May. I've attached the confirmation from
            my new landlord. Please tell me in writing on which day the contract ends, and don't call me to offer me
            a better deal.
        """,
        "water shutoff": """
            On Wednesday the water will be off in the whole house between 8 and 12 because a valve gets replaced.
            Fill a bucket for the toilet. If the water is brown afterwards let it run for a minute.
        """,
        "book club": """
            Next time we read the short one about the lighthouse, because nobody finished the long one. We meet at
            Ines's place, not at mine, since my kitchen has no floor at the moment. Wine is welcome.
        """,
        "lost dog": """
            Our dog Biscuit ran away on Monday near the canal. He's small, brown, old and a bit deaf, so calling
            doesn't help much, but he loves cheese. If you see him, please call us at any hour.
        """,
        "job application": """
            I saw your ad for a carpenter. I've been doing this for nine years, mostly stairs and windows. I have a
            van and my own tools. I could start in June. I'd like to see the workshop first, if that's okay.
        """,
    }
)

EVAL_PASSAGES = unwrapped(
    {
        "the lamp factory": """
            The lamp factory in Grint closed its enamel shop in 1998, and for twenty years nobody in the country
            could coat a lampshade in the old green. Then two former workers, both past seventy, found the recipe in
            a lunch box. They rented a kiln from a potter and failed for a winter. In spring the colour was right.
            They sell forty shades a month and have taken on an apprentice, who is the first person below sixty to
            know the recipe.
        """,
        "the swimming lake": """
            The lake at Hollen was closed to swimmers in June because of blue-green algae. The town lowered the
            amount of fertiliser on the meadows upstream and planted reeds at the inlet. Divers measured how far
            they could see: one metre in the first month and three in September. The lake will open again next year,
            but boats with engines stay forbidden.
        """,
        "the evening course": """
            An evening course in Tamsin teaches adults to read. Eleven people attend, the youngest aged nineteen,
            the eldest eighty-one. They bring what they need to understand: a lease, a letter from the clinic, a
            label. The teacher uses no textbook. After one year most of them read slowly but alone, and two have
            begun to help the beginners.
        """,
        "the stone bridge": """
            The stone bridge of Caddo is closed to lorries. An engineer found that one of its piers has sunk by nine
            centimetres since the dredging of the harbour. Repairs would need eight months and half of the yearly
            road budget. Until then lorries take the motorway, which adds twenty minutes, and the bakery at the
            bridge sells more to people on foot.
        """,
    }
)

EVAL_MESSAGES = unwrapped(
    {
        "school trip": """
            The bus for the museum leaves at 7:30 sharp. Kids need a packed lunch, a raincoat and no more than five
            euros. Last year someone brought a hamster, please don't.
        """,
        "wet wood": """
            The firewood you brought is soaking wet. It hisses and smokes and the chimney sweep shook his head.
            Either swap it or give me back half of what I paid.
        """,
    }
)
