"""The tables of TPC-H that query 16 uses, by a seed: `part`, `partsupp` and `supplier`, with the distributions
that clause 4.2 of the specification gives for their columns, and the query with its validation parameters."""

import random

COLORS = """almond antique aquamarine azure beige bisque black blanched blue blush brown burlywood burnished
chartreuse chiffon chocolate coral cornflower cornsilk cream cyan dark deep dim dodger drab firebrick floral forest
frosted gainsboro ghost goldenrod green grey honeydew hot indian ivory khaki lace lavender lawn lemon light lime
linen magenta maroon medium metallic midnight mint misty moccasin navajo navy olive orange orchid pale papaya peach
peru pink plum powder puff purple red rose rosy royal saddle salmon sandy seashell sienna sky slate smoke snow
spring steel tan thistle tomato turquoise violet wheat white yellow""".split()
TYPES = (["STANDARD", "SMALL", "MEDIUM", "LARGE", "ECONOMY", "PROMO"],
         ["ANODIZED", "BURNISHED", "PLATED", "POLISHED", "BRUSHED"],
         ["TIN", "NICKEL", "BRASS", "STEEL", "COPPER"])
CONTAINERS = (["SM", "LG", "MED", "JUMBO", "WRAP"],
              ["CASE", "BOX", "BAG", "JAR", "PKG", "PACK", "CAN", "DRUM"])
# Words of the specification's grammar of texts.
WORDS = """foxes ideas theodolites pinto beans instructions dependencies excuses platelets asymptotes courts dolphins
multipliers sauternes warthogs frets dinos attainments somas patterns forges braids hockey players frays warhorses
dugouts notornis epitaphs pearls tithes waters orbits gifts sheaves depths sentiments decoys realms pains grouches
escapades sleep wake are cajole haggle nag use boost affix detect integrate maintain nod was lose sublate solve thrash
promise engage hinder print x-ray breach eat grow impress mold poach serve run dazzle snooze doze unwind kindle play
hang believe doubt furious sly careful blithe quick fluffy slow quiet ruthless thin close dogged daring brave stealthy
permanent enticing idle busy regular final ironic even bold silent sometimes always never furiously slyly carefully
blithely quickly fluffily slowly quietly ruthlessly thinly closely doggedly daringly bravely stealthily permanently
enticingly idly busily regularly finally ironically evenly boldly silently about above according across after against
along alongside among around at atop before behind beneath beside besides between beyond by despite during except for
from inside instead into near of on outside over past since through throughout to toward under until up upon without
with within""".split()
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789, "

TABLES = {
    "part": """p_partkey INTEGER NOT NULL PRIMARY KEY, p_name VARCHAR(55) NOT NULL, p_mfgr CHAR(25) NOT NULL,
        p_brand CHAR(10) NOT NULL, p_type VARCHAR(25) NOT NULL, p_size INTEGER NOT NULL,
        p_container CHAR(10) NOT NULL, p_retailprice DECIMAL(15,2) NOT NULL, p_comment VARCHAR(23) NOT NULL""",
    "partsupp": """ps_partkey INTEGER NOT NULL, ps_suppkey INTEGER NOT NULL, ps_availqty INTEGER NOT NULL,
        ps_supplycost DECIMAL(15,2) NOT NULL, ps_comment VARCHAR(199) NOT NULL,
        PRIMARY KEY (ps_partkey, ps_suppkey)""",
    "supplier": """s_suppkey INTEGER NOT NULL PRIMARY KEY, s_name CHAR(25) NOT NULL, s_address VARCHAR(40) NOT NULL,
        s_nationkey INTEGER NOT NULL, s_phone CHAR(15) NOT NULL, s_acctbal DECIMAL(15,2) NOT NULL,
        s_comment VARCHAR(101) NOT NULL""",
}
# Secondary indices: one on each column that query 16 does not use, and two on pairs of them. So the tables are
# less than a third of all blocks, and a cache of a third can keep them, as the paper's did.
INDICES = [("partsupp", "ps_availqty"), ("partsupp", "ps_supplycost"), ("partsupp", "ps_comment"),
           ("partsupp", "ps_supplycost, ps_comment"), ("partsupp", "ps_availqty, ps_comment"),
           ("part", "p_name"), ("part", "p_mfgr"), ("part", "p_container"), ("part", "p_retailprice"),
           ("part", "p_comment"), ("supplier", "s_name"), ("supplier", "s_address"), ("supplier", "s_phone"),
           ("supplier", "s_acctbal")]
QUERY = """SELECT p_brand, p_type, p_size, COUNT(DISTINCT ps_suppkey) AS supplier_cnt FROM partsupp, part
WHERE p_partkey = ps_partkey AND p_brand <> 'Brand#45' AND p_type NOT LIKE 'MEDIUM POLISHED%'
AND p_size IN (49, 14, 23, 45, 19, 3, 36, 9) AND ps_suppkey NOT IN
(SELECT s_suppkey FROM supplier WHERE s_comment LIKE '%Customer%Complaints%')
GROUP BY p_brand, p_type, p_size ORDER BY supplier_cnt DESC, p_brand, p_type, p_size"""


def create_index(table, columns):
    """The statement that makes an index."""
    return f"CREATE INDEX by_{columns.replace(', ', '_')} ON {table} ({columns})"


def texts(chance):
    """A function that returns a part of a long text, as dbgen does: the length lies between two bounds."""
    pool = " ".join(chance.choice(WORDS) for _ in range(200_000))
    def text(least, most):
        length = chance.randint(least, most)
        at = chance.randrange(len(pool) - length)
        return pool[at:at + length].replace("|", " ")
    return text


def rows(scale, seed=16):
    """Yields the name of a table and the text of a row, for a scale factor."""
    chance = random.Random(seed)
    text = texts(chance)
    parts, suppliers = int(200_000 * scale), int(10_000 * scale)
    for key in range(1, parts + 1):
        maker = chance.randint(1, 5)
        price = (90_000 + key // 10 % 20_001 + 100 * (key % 1000)) / 100
        fields = (key, " ".join(chance.sample(COLORS, 5)), f"Manufacturer#{maker}",
                  f"Brand#{maker}{chance.randint(1, 5)}", " ".join(map(chance.choice, TYPES)),
                  chance.randint(1, 50), " ".join(map(chance.choice, CONTAINERS)), f"{price:.2f}", text(5, 22))
        yield "part", "|".join(map(str, fields))
        for number in range(4):
            supplier = (key + number * (suppliers // 4 + (key - 1) // suppliers)) % suppliers + 1
            yield "partsupp", (f"{key}|{supplier}|{chance.randint(1, 9999)}|{chance.randint(100, 100_000) / 100:.2f}|"
                               + text(49, 198))
    # Of 10,000 suppliers, 5 have complaints and 5 have recommendations.
    special = {}
    for word in ("Complaints", "Recommends"):
        for _ in range(max(1, int(5 * scale))):
            special[chance.randint(1, suppliers)] = word
    for key in range(1, suppliers + 1):
        nation = chance.randrange(25)
        phone = f"{nation + 10}-{chance.randint(100, 999)}-{chance.randint(100, 999)}-{chance.randint(1000, 9999)}"
        comment = text(25, 100)
        if key in special:
            comment = f"{comment[:10]}Customer {comment[20:40]}{special[key]}"
        address = "".join(chance.choice(LETTERS) for _ in range(chance.randint(10, 40)))
        yield "supplier", "|".join(map(str, (key, f"Supplier#{key:09}", address, nation, phone,
                                             f"{chance.randint(-99_999, 999_999) / 100:.2f}", comment)))


def write(folder, scale):
    """Writes a file TABLE.tbl for each table."""
    files = {name: open(f"{folder}/{name}.tbl", "w", encoding="ascii") for name in TABLES}
    for name, row in rows(scale):
        files[name].write(row + "\n")
    for file in files.values():
        file.close()
