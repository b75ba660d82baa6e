"""Small files of words, tags and trees that tests preprocess."""

TEXT = "the cat sat on the mat .\nA dog barked at the cat !\nthe the the\n"
# Four sentences of IOB1: two spans of a type side by side, one of another type, none.
CHUNKS = """-DOCSTART- -X- O

The DT I-NP
cat NN I-NP
the DT B-NP
dog NN I-NP

it PRP I-NP
sat VBD I-VP
-LRB- ( O

no UH O

1984 CD I-NP

"""
TREES = """# sent_id = 1
# text = I don't see -LRB-.
1\tI\tI\tPRON\tPRP\t_\t4\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\tVBP\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\tRB\t_\t4\tadvmod:neg\t_\t_
4\tsee\tsee\tVERB\tVB\t_\t0\troot\t_\t_
4.1\tseen\tsee\tVERB\tVB\t_\t_\t_\t4:conj\t_
5\t-LRB-\t(\tPUNCT\t-LRB-\t_\t4\tpunct\t_\t_
6\t.\t.\tPUNCT\t.\t_\t4\tpunct\t_\t_

1\t10 000\t10000\tNUM\tCD\t_\t2\tnummod-x\t_\t_
2\tcats\tcat\tNOUN\tNNS\t_\t0\troot\t_\t_

"""
