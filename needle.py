"""
Needle in a haystack: does a frozen encoder still know one fact of a long document? (paper §4.4 and Appendix I)

    python needle.py --model=out/fr_base-clm/final,out/fr_base-mlm/final --haystack=data/fr10b
    python needle.py --model=A --model=B --haystack=notes.txt --language=en --lengths=512,1024 --n=600

Every example is `[CLS] query [SEP] document [SEP]` of exactly L tokens. The query states a medical fact. The document
holds one fact of the same kind at its start, middle or end: the query's own (positive), or one that differs in every
value (negative). A small probe reads the encoder's vector and answers which. Haystacks and facts of the three splits
are disjoint. The paper shows four of its eight kinds of facts; the other four were written for this script (P-802).

Two probes: the paper's, whose 789 steps at 2e-5 hardly move it (X-45), and the same network tuned on the validation
split. Beside them: the larger class, a bag of words of the whole input and one of the query alone, which must all sit
at chance. Intervals are Wilson's, at 95%, over test examples; seeds share these, so they do not narrow them.

Writes to out_dir: needle.json (everything), the figures needle.png and heatmap.png (and .svg), features/ (a cache),
and one row per (model, probe, seed) in results.jsonl, where a later run's row replaces an earlier one's.
"""

import hashlib
import json
import os
import random
import re
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure  # no pyplot: a Figure renders through Agg and never opens a window
from scipy.sparse import csr_array
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import MaxAbsScaler
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

from checkpoint import load_tokenizer
from configurator import configure
from features import autocast, batches_of, compute, flat_batch, read_texts
from model import default_device, default_dtype, load_model

model = None  # checkpoint directories or hub ids, separated by commas, or --model= several times
haystack = None  # text to hide facts in: a directory of prepare_data.py (its val split), .jsonl ("text") or .txt
language = "fr"  # fr | en: of the facts (P-801)
lengths = (512, 1024, 2048, 4096, 8192)  # tokens of an example, all of them counted (P-804)
positions = ("start", "middle", "end")  # of the fact in the document (P-804)
n = 1500  # examples: 70% train, 15% validation, 15% test, balanced over lengths, positions and answers (P-805)
data_seed = 42  # of the examples
seeds = (42, 43, 44)  # of the probe: first weights, order, dropout (the paper has one run, P-809)
pooling = "cls"  # cls: final norm's output at [CLS] (P-806) | mean: of all tokens | max_windows: of means of 512
unfreeze = False  # True: train the encoder with the paper's probe, instead of probing its frozen vector
lr = 2e-5  # of the paper's probe (P-807), and of everything with --unfreeze=True
epochs = 3  # the best by validation accuracy is kept (P-807)
batch_size = 4  # examples (P-807)
tuned_lrs = (1e-4, 3e-4, 1e-3, 3e-3)  # of the tuned probe, the best by validation accuracy
tuned_epochs = 30  # of the tuned probe, in batches of 32 on standardised vectors
dropout = 0.1  # of the probes; the paper names none (P-806)
batch_tokens = 8192  # tokens of one forward pass, for memory only
device = "auto"  # auto: cuda, else mps, else cpu
dtype = "auto"  # of the forward pass: auto: what is fast | float32 | bfloat16
out_dir = "out/needle"  # where everything goes

WINDOW = 512  # tokens, of max_windows
KEPT = ("n", "lengths", "positions", "pooling", "data_seed", "unfreeze", "lr", "epochs", "batch_size", "tuned_lrs")
KEPT += ("tuned_epochs", "dropout")  # the settings that the results depend on, written beside them
SPLITS = {"train": 0.70, "val": 0.15, "test": 0.15}  # P-805

# A kind of fact: its sentence, and the values of each gap. Every value fits: articles and prepositions that depend on a
# value are part of it.
FACTS = {
    "fr": {
        "drug": (
            "Le patient a reçu {} de {} par voie {}.",
            "10 mg|50 mg|75 mg|200 mg|250 mg|400 mg|500 mg|1 g",
            "morphine|tramadol|paracétamol|furosémide|prednisone|metformine|kétamine|bisoprolol",
            "intraveineuse|orale|sous-cutanée|intramusculaire|rectale|sublinguale|inhalée|nasale",
        ),
        "vital sign": (
            "La pression artérielle était mesurée à {} mmHg, avec une fréquence cardiaque de {} battements par minute.",
            "95/60|110/70|120/80|135/75|145/85|160/90|170/100|180/110",
            "54|62|71|83|94|106|118|127",
        ),
        "laboratory result": (
            "Le {} jour, le taux de {} était {}.",
            "premier|deuxième|troisième|quatrième|cinquième|sixième|septième|huitième",
            "créatinine|ferritine|troponine|bilirubine|procalcitonine|cholestérol|potassium|lactate",
            "normal|abaissé|effondré|élevé|très élevé|indétectable|stable|doublé",
        ),
        "diagnosis": (
            "Diagnostic retenu : {}, stade {}.",
            "cirrhose hépatique|insuffisance rénale chronique|cancer bronchique|lymphome de Hodgkin|mélanome cutané|"
            "endométriose pelvienne|arthrose du genou|adénocarcinome colique",
            "I|II|III|IV|IIA|IIB|IIIA|IIIB",
        ),
        "procedure": (
            "Une {} a été réalisée {} sous {}.",
            "coloscopie|gastroscopie|bronchoscopie|biopsie rénale|coronarographie|"
            "cystoscopie|ponction pleurale|arthroscopie",
            "lundi matin|mardi matin|mercredi matin|jeudi matin|lundi soir|mardi soir|jeudi soir|vendredi soir",
            "anesthésie locale|anesthésie générale|sédation légère|sédation profonde",
        ),
        "allergy": (
            "Le patient signale une allergie {} ayant provoqué {}.",
            "à la pénicilline|au latex|aux arachides|à l'iode|aux crustacés|au pollen|à l'aspirine|aux sulfamides",
            "une urticaire|un œdème|un choc|une éruption|une toux|un malaise|un bronchospasme|une conjonctivite",
        ),
        "treatment duration": (
            "Un traitement par {} a été prescrit pendant {}.",
            "amoxicilline|rivaroxaban|corticoïdes|lévothyroxine|isoniazide|doxycycline|oméprazole|colchicine",
            "trois jours|cinq jours|dix jours|deux semaines|six semaines|trois mois|six mois|un an",
        ),
        "symptom": (
            "Le patient rapporte une {} évoluant depuis {}.",
            "dyspnée|asthénie|toux sèche|céphalée|fièvre|douleur thoracique|diarrhée|dysphagie",
            "deux jours|quatre jours|une semaine|trois semaines|un mois|quatre mois|huit mois|deux ans",
        ),
    },
    "en": {
        "drug": (
            "The patient received {} of {} by the {} route.",
            "10 mg|50 mg|75 mg|200 mg|250 mg|400 mg|500 mg|1 g",
            "morphine|tramadol|paracetamol|furosemide|prednisone|metformin|ketamine|bisoprolol",
            "intravenous|oral|subcutaneous|intramuscular|rectal|sublingual|inhaled|nasal",
        ),
        "vital sign": (
            "Blood pressure was {} mmHg, with a heart rate of {} beats per minute.",
            "95/60|110/70|120/80|135/75|145/85|160/90|170/100|180/110",
            "54|62|71|83|94|106|118|127",
        ),
        "laboratory result": (
            "On the {} day, the {} level was {}.",
            "first|second|third|fourth|fifth|sixth|seventh|eighth",
            "creatinine|ferritin|troponin|bilirubin|procalcitonin|cholesterol|potassium|lactate",
            "normal|lowered|very low|raised|very high|undetectable|stable|doubled",
        ),
        "diagnosis": (
            "Final diagnosis: {}, stage {}.",
            "liver cirrhosis|chronic kidney disease|lung cancer|Hodgkin lymphoma|skin melanoma|"
            "pelvic endometriosis|knee osteoarthritis|colon adenocarcinoma",
            "I|II|III|IV|IIA|IIB|IIIA|IIIB",
        ),
        "procedure": (
            "A {} was performed on {} under {}.",
            "colonoscopy|gastroscopy|bronchoscopy|kidney biopsy|coronary angiography|"
            "cystoscopy|pleural tap|knee arthroscopy",
            "Monday morning|Tuesday morning|Wednesday morning|Thursday morning|Monday evening|"
            "Tuesday evening|Thursday evening|Friday evening",
            "local anaesthesia|general anaesthesia|light sedation|deep sedation",
        ),
        "allergy": (
            "The patient reports an allergy to {} that caused {}.",
            "penicillin|latex|peanuts|iodine|shellfish|pollen|aspirin|sulphonamides",
            "hives|swelling|shock|a rash|a cough|fainting|bronchospasm|conjunctivitis",
        ),
        "treatment duration": (
            "A course of {} was prescribed for {}.",
            "amoxicillin|rivaroxaban|steroids|levothyroxine|isoniazid|doxycycline|omeprazole|colchicine",
            "three days|five days|ten days|two weeks|six weeks|three months|six months|one year",
        ),
        "symptom": (
            "The patient describes {} present for {}.",
            "dyspnoea|fatigue|a dry cough|headache|fever|chest pain|diarrhoea|dysphagia",
            "two days|four days|one week|three weeks|one month|four months|eight months|two years",
        ),
    },
}
FACTS = {
    language: {kind: (sentence, *(x.split("|") for x in gaps)) for kind, (sentence, *gaps) in kinds.items()}
    for language, kinds in FACTS.items()
}


def fail(message):
    raise SystemExit(f"needle.py: {message}")


# ----------------------------------------------------------------------------------------------------------------------
# The task


def split_of(key):
    """The split that a fact or a document belongs to, by its content: the same whatever else there is."""
    share = int.from_bytes(hashlib.blake2b(f"{data_seed} {key}".encode(), digest_size=6).digest(), "big") / 2**48
    return "train" if share < SPLITS["train"] else "val" if share < SPLITS["train"] + SPLITS["val"] else "test"


def fact_pairs(split):
    """{kind: [(fact, other fact), ...]}: all ordered pairs of a split's facts that differ in every value, as sentences.

    A positive asks for the first and hides the first, a negative hides the other. Since each pair comes in both orders,
    every fact is as often asked for as hidden, in positives as in negatives: no word of the input tells them apart."""
    pairs = {}
    for kind, (sentence, *lexicons) in FACTS[language].items():
        values = [()]
        for lexicon in lexicons:
            values = [(*before, value) for before in values for value in lexicon]
        values = [v for v in values if split_of((kind, *v)) == split]
        different = [(a, b) for a in values for b in values if all(x != y for x, y in zip(a, b, strict=True))]
        pairs[kind] = [(sentence.format(*a), sentence.format(*b)) for a, b in different]
    return pairs


def haystack_sentences(texts, tokenizer):
    """{split: [documents of [sentences of ids]]}. A sentence that holds a value of some fact is left out."""
    values = {v.lower() for _, *lexicons in FACTS[language].values() for lexicon in lexicons for v in lexicon}
    taken = re.compile(r"\b(?:" + "|".join(map(re.escape, sorted(v for v in values if len(v) > 3))) + r")\b")
    documents = {split: [] for split in SPLITS}
    for text in texts:
        sentences = [s for s in re.split(r"(?<=[.!?])\s+|\n+", text) if s and not taken.search(s.lower())]
        if sentences:
            ids = tokenizer([" " + s for s in sentences], add_special_tokens=False, verbose=False)["input_ids"]
            documents[split_of(text)].append(ids)
    for split, found in documents.items():
        if not sum(map(len, found)):
            what = "more text, in which the values of the facts do not come up"
            fail(f"--haystack={haystack}: no sentence for the {split} split; expected {what}")
    return documents


def assemble(query, fact, documents, length, position, tokenizer, rng):
    """[CLS] query [SEP] document [SEP], exactly `length` ids, put together as ids so that nothing is tokenized twice.
    -> ids, and where the fact begins. The fact stands at a boundary of sentences (P-804)."""
    query = tokenizer(query, add_special_tokens=False)["input_ids"]
    fact = tokenizer(" " + fact, add_special_tokens=False)["input_ids"]
    room = length - 3 - len(query) - len(fact)
    if room < 1:
        fail(f"--lengths={length}: query and fact, {len(query)} + {len(fact)} tokens, leave no room for a document")
    hay, starts = [], []
    while len(hay) < room:
        for sentence in documents[rng.randrange(len(documents))]:
            starts.append(len(hay))
            hay.extend(sentence)
    hay = hay[:room]  # the last sentence may be cut; query and fact never are
    middle = min((s for s in starts if s <= room), key=lambda s: abs(s - room / 2))
    at = {"start": 0, "middle": middle, "end": room}[position]
    head = [tokenizer.cls_token_id, *query, tokenizer.sep_token_id]
    return [*head, *hay[:at], *fact, *hay[at:], tokenizer.sep_token_id], len(head) + at


def make_examples(texts, tokenizer):
    """-> n examples as dicts: ids, label, split, length, position, kind, query (ids), at. Balanced in every split:
    cells of (length, position) and answers come up in turn, kinds of facts too."""
    documents = haystack_sentences(texts, tokenizer)
    sizes = {split: round(n * share) for split, share in SPLITS.items()}
    sizes["train"] = n - sizes["val"] - sizes["test"]
    examples = []
    bar = tqdm(total=n, desc="examples", unit="example", file=sys.stderr, leave=False)
    for split, size in sizes.items():
        rng, pairs = random.Random(f"{data_seed} {split}"), fact_pairs(split)
        cells = [(length, position) for length in lengths for position in positions]
        rng.shuffle(cells)
        turns = [(*cell, label) for cell in cells for label in (1, 0)]
        kinds = list(pairs)
        for i in range(size):
            length, position, label = turns[i % len(turns)]
            kind = kinds[(i // len(turns) + i) % len(kinds)]
            query, other = rng.choice(pairs[kind])
            ids, at = assemble(query, query if label else other, documents[split], length, position, tokenizer, rng)
            asked = tokenizer(query, add_special_tokens=False)["input_ids"]
            examples.append({"ids": ids, "label": label, "split": split, "length": length, "position": position,
                             "kind": kind, "query": asked, "at": at})  # fmt: skip
            bar.update()
    bar.close()
    return examples


# ----------------------------------------------------------------------------------------------------------------------
# Features: the frozen encoder, once


def pool(hidden):
    """One example's (T, C) -> (C,)."""
    if pooling == "cls":
        return hidden[0]
    if pooling == "mean":
        return hidden.mean(0)
    return torch.stack([window.mean(0) for window in hidden.split(WINDOW)]).amax(0)


def pool_all(output, sizes):
    """The model's output for several examples, side by side -> (n, C) fp32."""
    return torch.stack([pool(part.float()) for part in output.last_hidden_state.split(sizes)])


def features(brief, encoder, examples, where, kind):
    """(n, C) fp32 on the CPU. Kept in out_dir/features under a hash of the weights and the examples."""
    ids = [example["ids"] for example in examples]
    options = dict(batch_tokens=batch_tokens, cache=Path(out_dir) / "features")
    reduce = lambda output, sizes: pool_all(output, sizes).cpu().numpy()  # noqa: E731
    return torch.from_numpy(compute(encoder, ids, reduce, f"{pooling} {WINDOW}", brief, where, kind, **options))


# ----------------------------------------------------------------------------------------------------------------------
# Probes


def make_probe(width):
    """P-806."""
    layers = [nn.Dropout(dropout), nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 2)]
    return nn.Sequential(*layers)


def by_split(examples):
    labels = torch.tensor([example["label"] for example in examples])
    return labels, {s: [i for i, example in enumerate(examples) if example["split"] == s] for s in SPLITS}


def train_probe(vectors, examples, seed, lr, epochs, size):
    """Vectors (n, C) -> best validation accuracy over the epochs, and the answers (n,) at that epoch (P-807)."""
    torch.manual_seed(seed)
    labels, rows = by_split(examples)
    probe = make_probe(vectors.shape[1])
    optimizer = torch.optim.AdamW(probe.parameters(), lr=lr)
    best, answers = -1.0, None
    for _ in range(epochs):
        probe.train()
        order = torch.tensor(rows["train"])[torch.randperm(len(rows["train"]))]
        for batch in order.split(size):
            nn.functional.cross_entropy(probe(vectors[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            found = probe.eval()(vectors).argmax(1)
        accuracy = (found == labels)[rows["val"]].float().mean().item()
        if accuracy > best:
            best, answers = accuracy, found
    return best, answers


def tuned_probe(vectors, examples, seed):
    """The same network on vectors standardised on train, at the learning rate that does best on validation."""
    train = vectors[by_split(examples)[1]["train"]]
    vectors = (vectors - train.mean(0)) / train.std(0).clamp(min=1e-6)
    return max((train_probe(vectors, examples, seed, lr, tuned_epochs, 32) for lr in tuned_lrs), key=lambda x: x[0])


def train_all(name, examples, seed, where, kind):
    """The encoder learns too (--unfreeze=True) -> as train_probe."""
    torch.manual_seed(seed)
    labels, rows = by_split(examples)
    encoder = load_model(name).to(where)
    probe = make_probe(encoder.config.hidden_size).to(where)
    used = [*encoder.model.parameters(), *probe.parameters()]  # not the vocabulary's head
    optimizer = torch.optim.AdamW(used, lr=lr)
    ids = [example["ids"] for example in examples]

    def answer(rows):
        stream, cu_seqlens = flat_batch([ids[i] for i in rows], where)
        sizes = [len(ids[i]) for i in rows]
        with autocast(where, kind):
            out = encoder(stream, cu_seqlens=cu_seqlens, max_seqlen=max(sizes), output_logits=False)
        return probe(pool_all(out, sizes))

    best, answers = -1.0, None
    for epoch in range(epochs):
        encoder.train()
        probe.train()
        order = torch.tensor(rows["train"])[torch.randperm(len(rows["train"]))]
        progress = f"{name}, seed {seed}, epoch {epoch + 1}/{epochs}"
        for batch in tqdm(order.split(batch_size), desc=progress, unit="step", leave=False):
            nn.functional.cross_entropy(answer(batch.tolist()), labels[batch].to(where)).backward()
            optimizer.step()
            optimizer.zero_grad()
        encoder.eval()
        probe.eval()
        found = torch.empty(len(examples), dtype=torch.long)
        with torch.no_grad():
            for batch in batches_of(ids, batch_tokens):
                found[batch] = answer(batch).argmax(1).cpu()
        accuracy = (found == labels)[rows["val"]].float().mean().item()
        if accuracy > best:
            best, answers = accuracy, found
    return best, answers


def bag_of_words(examples, key):
    """Logistic regression on how often each token comes up in `key` (ids or query): it must know nothing."""
    counts = [Counter(example[key]) for example in examples]
    rows = [i for i, count in enumerate(counts) for _ in count]
    columns = [token for count in counts for token in count]
    values = [float(number) for count in counts for number in count.values()]
    bags = MaxAbsScaler().fit_transform(csr_array((values, (rows, columns))))
    labels, split = by_split(examples)
    probe = LogisticRegression(max_iter=1000).fit(bags[split["train"]], labels[split["train"]])
    return torch.from_numpy(probe.predict(bags))


def controls(examples):
    """What must sit at chance -> {name: scores}."""
    labels, rows = by_split(examples)
    larger = torch.full_like(labels, int(labels[rows["test"]].float().mean() >= 0.5))
    bags = {"bag of words": bag_of_words(examples, "ids"), "query alone": bag_of_words(examples, "query")}
    return {name: score([answers], examples) for name, answers in {"larger class": larger, **bags}.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Results


def accuracy(right):
    """Mean and 95% Wilson interval. `right` (seeds, examples): the examples count, however many seeds answered them."""
    right = np.atleast_2d(np.asarray(right, dtype=float))
    mean, size = right.mean(), right.shape[1]
    low, high = binomtest(round(mean * size), size).proportion_ci(method="wilson")
    return {"accuracy": mean, "low": low, "high": high, "n": size}


def score(answers, examples):
    """Answers (seeds, n) -> accuracies on test: in all, by length, by position, by cell; and the confusion matrix."""
    test = [i for i, example in enumerate(examples) if example["split"] == "test"]
    labels = np.array([examples[i]["label"] for i in test])
    answers = np.atleast_2d(np.stack([np.asarray(a) for a in answers]))[:, test]
    right = answers == labels

    def where(**wanted):
        return accuracy(right[:, [all(examples[i][k] == v for k, v in wanted.items()) for i in test]])

    return {
        **accuracy(right),
        "length": {str(x): where(length=x) for x in lengths},
        "position": {x: where(position=x) for x in positions},
        "cell": {f"{x} {y}": where(length=x, position=y) for x in lengths for y in positions},
        "confusion": [[float(((labels == a) & (answers == b)).sum(1).mean()) for b in (0, 1)] for a in (0, 1)],
    }


def table(results):
    """Accuracy in percent, its interval, and the slices; lines that line up, and markdown."""
    slices = [("length", str(x)) for x in lengths] + [("position", x) for x in positions]
    lines = []
    for name, found in results.items():
        interval = f"{100 * found['low']:.1f}-{100 * found['high']:.1f}"
        cells = [f"{100 * found[k][x]['accuracy']:.1f}" for k, x in slices]
        lines.append([name, f"{100 * found['accuracy']:.1f}", interval, *cells])
    counts = next(iter(results.values()))
    lines.append(["test examples", str(counts["n"]), "", *(str(counts[k][x]["n"]) for k, x in slices)])
    head = ["", "accuracy %", "95% Wilson", *(x for _, x in slices)]
    ends = ("left", *["right"] * (len(head) - 1))
    return tabulate(lines, head, tablefmt="github", colalign=ends, disable_numparse=True)


def save_figure(figure, name):
    for suffix in ("png", "svg"):
        part = Path(out_dir) / f"{name}.{suffix}.part"
        figure.savefig(part, format=suffix, dpi=200)
        os.replace(part, part.with_suffix(""))


LIMITS = ("accuracy", "low", "high")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # differ for colour-blind eyes too


def draw(results, title):
    """Figure 2: accuracy by length and by position, with intervals and the line of chance; a row for each probe."""
    probes = list(results)
    widths = max(2, len(lengths)), max(2, len(positions))
    figure = Figure(figsize=(9, 1 + 3 * len(probes)), layout="constrained")
    grid = figure.subplots(len(probes), 2, sharey=True, squeeze=False, width_ratios=widths)
    for panels, probe in zip(grid, probes, strict=True):
        for axes, key, names in zip(panels, ("length", "position"), (lengths, positions), strict=True):
            for i, (name, found) in enumerate(results[probe].items()):
                x = np.arange(len(names)) + 0.12 * (i - (len(results[probe]) - 1) / 2)
                y, low, high = (np.array([100 * found[key][str(s)][k] for s in names]) for k in LIMITS)
                style = dict(fmt="os^Dv*"[i % 6] + "-", capsize=3, color=COLOURS[i % 6], label=name)
                axes.errorbar(x, y, (y - low, high - y), **style)
            axes.axhline(50, color="0.4", linestyle=":", linewidth=1, label="chance")
            axes.set(xticks=range(len(names)), xticklabels=names, ylim=(0, 103), xlim=(-0.5, len(names) - 0.5))
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", alpha=0.3)
        panels[0].set_ylabel(f"{probe}\ntest accuracy (%)")
    grid[-1, 0].set_xlabel("tokens")
    grid[-1, 1].set_xlabel("position of the fact")
    chance, *handles = grid[0, 0].get_legend_handles_labels()[0]  # plain lines come before those with intervals
    figure.legend(handles=[*handles, chance], loc="outside upper center", ncols=4, frameon=False, title=title)
    save_figure(figure, "needle")


def draw_heatmap(results, title):
    """Length x position for every model (columns) and probe (rows), on one scale."""
    rows, columns = len(results), max(map(len, results.values()))
    figure = Figure(figsize=(1.6 + 2.4 * columns, 0.8 + 2.4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for panels, (probe, models) in zip(grid, results.items(), strict=True):
        panels[0].set_ylabel(f"{probe}\ntokens")
        for axes, (name, found) in zip(panels, models.items(), strict=True):
            cells = np.array([[100 * found["cell"][f"{x} {y}"]["accuracy"] for y in positions] for x in lengths])
            image = axes.imshow(cells, vmin=0, vmax=100, cmap="RdBu", aspect="auto")
            axes.set(xticks=range(len(positions)), xticklabels=positions, yticks=range(len(lengths)))
            axes.set_yticklabels(lengths)
            axes.set_title(name, fontsize=9)
            for (row, column), value in np.ndenumerate(cells):
                text = f"{value:.0f}%\nof {found['cell'][f'{lengths[row]} {positions[column]}']['n']}"
                colour = "white" if abs(value - 50) > 30 else "black"
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, ax=figure.axes, label="test accuracy (%), 50 = chance", shrink=0.8)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, "heatmap")


# ----------------------------------------------------------------------------------------------------------------------


def check_settings():
    for key in ("model", "haystack"):
        if not globals()[key]:
            fail(f"--{key}={globals()[key]}: expected {'checkpoints' if key == 'model' else 'text'}, see --help")
    for key, choices in {"language": FACTS, "pooling": ("cls", "mean", "max_windows")}.items():
        if globals()[key] not in choices:
            fail(f"--{key}={globals()[key]}: expected one of {', '.join(choices)}")
    if dtype not in ("auto", "float32", "bfloat16"):
        fail(f"--dtype={dtype}: expected auto, float32 or bfloat16")
    if not positions or not {*positions} <= {"start", "middle", "end"}:
        fail(f"--positions={positions}: expected some of start, middle, end")
    if not lengths or not all(isinstance(x, int) and x >= 64 for x in lengths):
        fail(f"--lengths={lengths}: expected numbers of tokens from 64 up, such as 512,1024")
    least = 14 * len(lengths) * len(positions)
    if n < least:
        fail(f"--n={n}: expected {least} or more, so that every length and position has both answers in the test split")
    if not seeds or not all(isinstance(seed, int) and seed >= 0 for seed in seeds):
        fail(f"--seeds={seeds}: expected whole numbers such as 42,43,44")
    for key in ("lr", "epochs", "batch_size", "tuned_epochs", "batch_tokens"):
        if globals()[key] <= 0:
            fail(f"--{key}={globals()[key]}: expected a number above 0")
    if not 0 <= dropout < 1:
        fail(f"--dropout={dropout}: expected 0 or more, and below 1")


def short(names):
    """Paths -> their last two parts, if these differ, else the whole."""
    brief = ["/".join(Path(name).parts[-2:]) for name in names]
    return brief if len(set(brief)) == len(brief) else list(names)


def probe_model(name, brief, examples, where, kind):
    """-> {probe: [(validation accuracy, answers) for each seed]}"""
    if unfreeze:
        return {"fine-tuned": [train_all(name, examples, seed, where, kind) for seed in seeds]}
    vectors = features(brief, load_model(name), examples, where, kind)
    runs = [
        (train_probe(vectors, examples, seed, lr, epochs, batch_size), tuned_probe(vectors, examples, seed))
        for seed in tqdm(seeds, desc=f"probes, {brief}", unit="seed", leave=False)
    ]
    return {"paper's probe": [paper for paper, _ in runs], "tuned probe": [tuned for _, tuned in runs]}


def main():
    check_settings()
    names = [name.strip() for name in str(model).split(",") if name.strip()]
    where = default_device() if device == "auto" else torch.device(device)
    kind = default_dtype(where) if dtype == "auto" else getattr(torch, dtype)
    tokenizers = {name: load_tokenizer(name) for name in names}  # all, so that a wrong name ends the run here
    texts = sorted(set(read_texts(haystack, "haystack")))  # the order of the source means nothing
    settings = {key: globals()[key] for key in KEPT} | {"dtype": str(kind).removeprefix("torch.")}
    versions = {package: version(package) for package in ("torch", "transformers", "tokenizers")}
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    known, found, made = {}, {}, {}  # scores of the controls; of {probe: {model}}; examples of each vocabulary
    for brief, name in zip(short(names), names, strict=True):
        vocabulary = frozenset(tokenizers[name].get_vocab().items())
        if vocabulary not in made:  # models of one tokenizer read the same examples
            made[vocabulary] = make_examples(texts, tokenizers[name])
            more = f" ({brief}'s tokenizer)" if len(made) > 1 else ""
            known |= {control + more: scores for control, scores in controls(made[vocabulary]).items()}
        examples = made[vocabulary]
        with open(Path(out_dir) / "results.jsonl", "a", encoding="utf-8") as file:
            for probe, runs in probe_model(name, brief, examples, where, kind).items():
                found.setdefault(probe, {})[brief] = score([answers for _, answers in runs], examples)
                for seed, (val, answers) in zip(seeds, runs, strict=True):
                    row = {"model": name, "task": f"needle_{language}", "probe": probe, "seed": seed}
                    row |= {"val": {"accuracy": val}, "test": score([answers], examples)}
                    row |= {"sizes": Counter(example["split"] for example in examples)}
                    file.write(json.dumps({**row, "settings": settings, "versions": versions}) + "\n")
    flat = known | {f"{brief}, {probe}": scores for probe in found for brief, scores in found[probe].items()}
    print(table(flat))

    part = Path(out_dir) / "needle.json.part"
    about = {"language": language, "haystack": str(haystack), "settings": settings, "versions": versions}
    part.write_text(json.dumps({**about, "controls": known, "probes": found}, indent=1) + "\n", "utf-8")
    os.replace(part, part.with_suffix(""))
    test = sum(example["split"] == "test" for example in examples)
    title = f"one fact in a document ({language}): {test} test examples, 95% Wilson intervals, {len(seeds)} seeds"
    draw(found, title)
    draw_heatmap(found, title)
    print(f"written to {out_dir}: needle.png, heatmap.png, needle.json, results.jsonl")


if __name__ == "__main__":
    configure(globals())
    several = [argument.removeprefix("--model=") for argument in sys.argv if argument.startswith("--model=")]
    if len(several) > 1:
        model = ",".join(several)
    main()
