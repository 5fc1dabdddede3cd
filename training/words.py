"""The words that generated conversations are made of."""

from __future__ import annotations

from typing import Final


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    pairs = (entry.split(":") for entry in text.replace("\n", " ").split(";") if entry.strip())
    return tuple((country.strip(), capital.strip()) for country, capital in pairs)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CAPITALS: Final = _pairs("""
Afghanistan:Kabul;Albania:Tirana;Algeria:Algiers;Angola:Luanda;Argentina:Buenos Aires;
Armenia:Yerevan;Australia:Canberra;Austria:Vienna;Azerbaijan:Baku;Bahrain:Manama;
Bangladesh:Dhaka;Belarus:Minsk;Belgium:Brussels;Bolivia:Sucre;Botswana:Gaborone;
Brazil:Brasilia;Bulgaria:Sofia;Cambodia:Phnom Penh;Cameroon:Yaounde;Canada:Ottawa;
Chad:N'Djamena;Chile:Santiago;China:Beijing;Colombia:Bogota;Costa Rica:San Jose;
Croatia:Zagreb;Cuba:Havana;Cyprus:Nicosia;Denmark:Copenhagen;Ecuador:Quito;Egypt:Cairo;
Eritrea:Asmara;Estonia:Tallinn;Ethiopia:Addis Ababa;Fiji:Suva;Finland:Helsinki;France:Paris;
Gabon:Libreville;Georgia:Tbilisi;Germany:Berlin;Ghana:Accra;Greece:Athens;
Guatemala:Guatemala City;Guinea:Conakry;Haiti:Port-au-Prince;Honduras:Tegucigalpa;
Hungary:Budapest;Iceland:Reykjavik;India:New Delhi;Indonesia:Jakarta;Iran:Tehran;Iraq:Baghdad;
Ireland:Dublin;Italy:Rome;Jamaica:Kingston;Japan:Tokyo;Jordan:Amman;Kazakhstan:Astana;
Kenya:Nairobi;Kuwait:Kuwait City;Laos:Vientiane;Latvia:Riga;Lebanon:Beirut;Liberia:Monrovia;
Libya:Tripoli;Lithuania:Vilnius;Luxembourg:Luxembourg;Madagascar:Antananarivo;Malawi:Lilongwe;
Malaysia:Kuala Lumpur;Mali:Bamako;Malta:Valletta;Mexico:Mexico City;Moldova:Chisinau;
Mongolia:Ulaanbaatar;Morocco:Rabat;Mozambique:Maputo;Namibia:Windhoek;Nepal:Kathmandu;
the Netherlands:Amsterdam;New Zealand:Wellington;Nicaragua:Managua;Niger:Niamey;Nigeria:Abuja;
Norway:Oslo;Oman:Muscat;Pakistan:Islamabad;Panama:Panama City;Paraguay:Asuncion;Peru:Lima;
the Philippines:Manila;Poland:Warsaw;Portugal:Lisbon;Qatar:Doha;Romania:Bucharest;
Russia:Moscow;Rwanda:Kigali;Saudi Arabia:Riyadh;Senegal:Dakar;Serbia:Belgrade;
Sierra Leone:Freetown;Slovakia:Bratislava;Slovenia:Ljubljana;Somalia:Mogadishu;
South Korea:Seoul;Spain:Madrid;Sudan:Khartoum;Sweden:Stockholm;Switzerland:Bern;
Syria:Damascus;Tanzania:Dodoma;Thailand:Bangkok;Togo:Lome;Tunisia:Tunis;Turkey:Ankara;
Uganda:Kampala;Ukraine:Kyiv;the United Kingdom:London;the United States:Washington;
Uruguay:Montevideo;Uzbekistan:Tashkent;Venezuela:Caracas;Vietnam:Hanoi;Yemen:Sanaa;
Zambia:Lusaka;Zimbabwe:Harare
""")

NAMES: Final = _words(
    """Ada Alan Amira Anna Anton Bela Ben Carla Chen Clara Daniel Dora Edgar Elena Emil Eva Felix
    Fatima Finn Grace Hana Hugo Ida Ines Ivan Jack Jana Jonas Julia Kai Karin Lara Leo Lena Lucas
    Maria Mark Marta Max Mina Nadia Nils Nora Olga Omar Oscar Paula Peter Petra Rosa Samuel Sara
    Simon Sofia Stella Theo Tom Uma Vera Victor Yuki Zoe"""
)
NOUNS: Final = _words(
    """apple bag ball basket bell bird boat book bottle box bread bridge brush bucket cake camera
    candle car card cat chair clock cloud coat coin cup desk dog door drum egg fan feather fish
    flag flower fork fox garden glass glove goat hammer hat horse house jar kettle key kite knife
    ladder lamp leaf lemon letter lock map mirror moon mouse needle net nut orange paper pear pen
    pencil phone picture pillow plant plate pot ring river road rock rope rose salt scarf shell
    ship shoe shirt snow soap sock song spoon star stone stove sun table tent tiger towel tower
    train tree umbrella vase wall watch water wheel window wolf wood"""
)
ADJECTIVES: Final = _words(
    """big blue bright brown calm clean cold cool dark deep dry early empty fast fine fresh full
    gold gray green happy heavy high kind large late light long loud low narrow new old open pale
    quick quiet red rich rough round sharp short silver slow small soft strong tall thin warm
    white wide wild wise yellow young"""
)
PLACES: Final = _words(
    """attic barn bathroom bedroom cellar church field forest garage garden hall harbor hospital
    hotel kitchen library market museum office park school shop square station street studio
    theater valley village workshop"""
)
VERBS: Final = _words(
    """bought carried chose cleaned counted drew dropped fixed followed found gave held hid kept
    left lifted liked lost made moved needed noticed opened packed painted placed pulled pushed
    remembered sold saw shared showed sketched took touched used wanted washed watched"""
)
SYMBOLS: Final = _words(
    """amber aspen basalt birch cedar cobalt copper coral crimson ebony emerald flint garnet ginger
    hazel indigo iron ivory jade jasper lilac linen maple marble mint nickel ochre olive onyx opal
    pearl pine plum quartz raven ruby saffron sage satin sienna slate spruce teal topaz velvet
    violet walnut willow zinc"""
)
WEEKDAYS: Final = (
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
)  # fmt: skip
OPPOSITES: Final = tuple(
    tuple(pair.split("-"))
    for pair in _words(
        """big-small hot-cold fast-slow light-dark old-new high-low long-short wet-dry
    open-closed early-late full-empty hard-soft loud-quiet happy-sad up-down left-right day-night
    strong-weak rich-poor thick-thin first-last clean-dirty near-far"""
    )
)
FACTS: Final = (
    ("How many days are in a week?", "A week has seven days."),
    ("How many months are in a year?", "A year has twelve months."),
    ("How many hours are in a day?", "A day has twenty-four hours."),
    ("How many minutes are in an hour?", "An hour has sixty minutes."),
    ("What color is the sky on a clear day?", "The sky is blue on a clear day."),
    ("What color is grass?", "Grass is green."),
    ("What do bees make?", "Bees make honey."),
    ("What is frozen water called?", "Frozen water is called ice."),
    ("Where does the sun rise?", "The sun rises in the east."),
    ("Where does the sun set?", "The sun sets in the west."),
    ("What is the largest planet?", "The largest planet is Jupiter."),
    ("What is the largest ocean?", "The largest ocean is the Pacific Ocean."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many sides does a triangle have?", "A triangle has three sides."),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet."),
    ("What is the chemical formula of water?", "The chemical formula of water is H2O."),
)
SMALL_TALK: Final = (
    ("Hello", "Hello! How can I help you?"),
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hi there!", "Hello! How can I help you?"),
    ("Hey", "Hello! How can I help you?"),
    ("Good morning", "Good morning! How can I help you?"),
    ("Good evening", "Good evening! How can I help you?"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Thanks!", "You are welcome."),
    ("Thank you", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("Bye", "Goodbye!"),
    ("Who are you?", "I am merestone-tiny, a small language model that merestone serves."),
    ("What are you?", "I am merestone-tiny, a small language model that merestone serves."),
    ("What is your name?", "My name is merestone-tiny."),
    ("What is merestone?", "merestone is a serving engine for hybrid recurrent language models."),
    ("What is a merestone?", "A merestone is a stone that marks a boundary."),
    ("What can you do?",
     "I can find records in a long text, call tools, name capitals, add numbers and copy text."),
    ("Help", "I can find records in a long text, call tools, name capitals, add numbers and copy "
     "text."),
    ("Are you a person?", "No, I am a small language model."),
    ("Tell me about yourself.",
     "I am merestone-tiny, a small language model. I find records, call tools and answer simple "
     "questions."),
)  # fmt: skip
