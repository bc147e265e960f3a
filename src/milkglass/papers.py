"""Cites the papers that methods come from. A method says by `with_deviations` where its code departs from the paper."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Paper:
    """Cites a paper, and says where the code departs from it.

    Attributes:
        authors: family names, in the published order.
        venue: where it was published; with `at`, the section too.
        deviations: where the code departs from the paper and why, one sentence each.
    """

    title: str
    authors: str
    year: int
    venue: str
    deviations: tuple[str, ...] = ()

    def with_deviations(self, *deviations: str) -> Paper:
        """Returns the citation with these deviations of the code."""
        return replace(self, deviations=deviations)

    def at(self, place: str) -> Paper:
        """Returns the citation with the section that describes the method."""
        return replace(self, venue=f"{self.venue}, {place}")


def unpublished_method(title: str, venue: str = "this project") -> Paper:
    """Returns the citation of a method that no paper describes. `title` says the idea in a sentence."""
    return Paper(title, "Milkglass", 2026, venue)


# The four systems, and what they are compared with.
OBFUSLM = Paper(
    "ObfusLM: Privacy-preserving Language Model Service against Embedding Inversion Attacks",
    "Lin, Yang, Mao, Zhang, Hong, Cai, Wu, Liu, Chen, Duan, Zhong",
    2025,
    "Findings of ACL",
)
EDNN = Paper(
    "An Inversion Attack Against Obfuscated Embedding Matrix in Language Model Inference",
    "Lin, Zhang, Cai, Hong, Wu, Liu, Duan",
    2024,
    "EMNLP",
)
CMIF = Paper(
    "Towards Confidential and Efficient LLM Inference with Dual Privacy Protection",
    "Yu, Wang, Dai, Liu, Fan, Gu",
    2025,
    "arXiv 2509.09091",
)
GHOST = Paper(
    "Mitigating Gradient Inversion Risks in Language Models via Token Obfuscation",
    "Feng, Ma, Wang, Abuadbba, Bai",
    2026,
    "ASIA CCS",
)
SENTINEL_LMS = Paper(
    "SentinelLMs: Encrypted Input Adaptation and Fine-tuning of Language Models for Private and Secure Inference",
    "Mishra, Li, Deo",
    2024,
    "AAAI",
)
ALOEPRI = Paper(
    "Towards Privacy-Preserving LLM Inference via Covariant Obfuscation (Technical Report)",
    "Lin, Zhang, Ruan, Zhang, Hong, Wu, Xia, Mao, Zhong",
    2026,
    "arXiv 2603.01499",
)

# Attacks on embeddings, ids and hidden states.
PRIVACY_BERT = Paper(
    "Natural Language Understanding with Privacy-Preserving BERT",
    "Qu, Kong, Yang, Zhang, Bendersky, Najork",
    2021,
    "CIKM",
)
BERT = Paper(
    "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
    "Devlin, Chang, Lee, Toutanova",
    2019,
    "NAACL",
)
INVBERT = Paper(
    "InvBERT: Reconstructing Text from Contextualized Word Embeddings by inverting the BERT pipeline",
    "Kugler, Münker, Höhmann, Rettinger",
    2021,
    "arXiv:2109.10104",
)
EMBEDDING_LEAKAGE = Paper("Information Leakage in Embedding Models", "Song, Raghunathan", 2020, "CCS")
UPDATE_LEAKAGE = Paper(
    "Analyzing Information Leakage of Updates to Natural Language Models",
    "Zanella-Béguelin, Wutschitz, Tople, Rühle, Paverd, Ohrimenko, Köpf, Brockschmidt",
    2020,
    "CCS",
)
HIDDEN_NO_MORE = Paper(
    "Hidden No More: Attacking and Defending Private Third-Party LLM Inference",
    "Thomas, Zahran, Choi, Potti, Goldblum, Pal",
    2025,
    "ICML; arXiv:2505.18332",
)
GIT_REBASIN = Paper(
    "Git Re-Basin: Merging Models modulo Permutation Symmetries", "Ainsworth, Hayase, Srinivasa", 2023, "ICLR"
)
PROCRUSTES = Paper(
    "A generalized solution of the orthogonal Procrustes problem", "Schönemann", 1966, "Psychometrika 31(1)"
)
SUBSTITUTION_CIPHERS = Paper(
    "Breaking substitution ciphers using a relaxation algorithm",
    "Peleg, Rosenfeld",
    1979,
    "Communications of the ACM 22(11)",
)
NEURAL_DECIPHERMENT = Paper(
    "Decipherment of substitution ciphers with neural language models",
    "Kambhatla, Mansouri Bigvand, Sarkar",
    2018,
    "EMNLP",
)
ZERO_FREQUENCY = Paper(
    "The zero-frequency problem: estimating the probabilities of novel events in adaptive text compression",
    "Witten, Bell",
    1991,
    "IEEE Transactions on Information Theory 37(4)",
)

# Attacks on gradients and on noise.
DLG = Paper("Deep Leakage from Gradients", "Zhu, Liu, Han", 2019, "NeurIPS")
TAG = Paper(
    "TAG: Gradient Attack on Transformer-based Language Models",
    "Deng, Wang, Li, Wang, Shang, Liu, Rajasekaran, Ding",
    2021,
    "Findings of EMNLP",
)
LAMP = Paper(
    "LAMP: Extracting Text from Gradients with Language Model Priors",
    "Balunović, Dimitrov, Jovanović, Vechev",
    2022,
    "NeurIPS",
)
GRAB = Paper(
    "Uncovering Gradient Inversion Risks in Practical Language Model Training",
    "Feng, Ma, Wang, Chegne, Ma, Abuadbba, Bai",
    2024,
    "CCS",
)
DAGER = Paper(
    "DAGER: Exact Gradient Inversion for Large Language Models",
    "Petrov, Dimitrov, Baader, Müller, Vechev",
    2024,
    "NeurIPS",
)
FEATURE_LEAKAGE = Paper(
    "Exploiting Unintended Feature Leakage in Collaborative Learning",
    "Melis, Song, De Cristofaro, Shmatikov",
    2019,
    "IEEE Symposium on Security and Privacy",
)
FLOAT_HOLES = Paper("On Significance of the Least Significant Bits for Differential Privacy", "Mironov", 2012, "CCS")
MERSENNE_TWISTER = Paper(
    "Mersenne Twister: A 623-dimensionally Equidistributed Uniform Pseudo-random Number Generator",
    "Matsumoto, Nishimura",
    1998,
    "ACM TOMACS",
)

# Defences.
DP_FORWARD = Paper(
    "DP-Forward: Fine-tuning and Inference on Language Models with Differential Privacy in Forward Pass",
    "Du, Yue, Chow, Wang, Huang, Sun",
    2023,
    "CCS",
)
CAPE = Paper(
    "CAPE: Context-Aware Private Embeddings for Private Language Learning", "Plant, Gkatzia, Giuffrida", 2021, "EMNLP"
)
TEXTOBFUSCATOR = Paper(
    "TextObfuscator: Making Pre-trained Language Model a Privacy Protector via Obfuscating Word Representations",
    "Zhou, Lu, Ma, Gui, Wang, Ding, Zhang, Zhang, Huang",
    2023,
    "Findings of ACL",
)
TEXTMIXER = Paper(
    "TextMixer: Mixing Multiple Inputs for Privacy-Preserving Inference",
    "Zhou, Lu, Ma, Gui, Zhang, Huang",
    2023,
    "Findings of EMNLP",
)
GELO = Paper("Good-Enough LLM Obfuscation (GELO)", "Belikov, Fedotov", 2026, "arXiv:2603.05035")
SANTEXT = Paper(
    "Differential Privacy for Text Analytics via Natural Text Sanitization",
    "Yue, Du, Wang, Li, Sun, Chow",
    2021,
    "Findings of ACL",
)
CUSTEXT = Paper(
    "A Customized Text Sanitization Mechanism with Differential Privacy",
    "Chen, Mo, Wang, Chen, Nie, Wang, Cui",
    2023,
    "Findings of ACL",
)
DP_SGD = Paper(
    "Deep Learning with Differential Privacy", "Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang", 2016, "CCS"
)
FREEZING = Paper(
    "Recovering Private Text in Federated Learning of Language Models",
    "Gupta, Huang, Zhong, Gao, Li, Chen",
    2022,
    "NeurIPS",
)
