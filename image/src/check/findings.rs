//! What a check has found.

/// How many problems are kept in words; the rest is counted.
const PROBLEMS_MAX: usize = 100;

/// What a check has found out. All counts are of clusters unless they say otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Mistakes that may lose data: wrong entries, and clusters with fewer counts than uses.
    pub errors: u64,
    /// Clusters that are counted as used more often than they are: space that is lost, and no data.
    pub leaks: u64,
    /// Leaks that were repaired; they are among `leaks`.
    pub leaks_fixed: u64,
    /// Clusters of the guest's disk.
    pub total: u64,
    /// Those that have room in the image.
    pub allocated: u64,
    /// Those of them that are compressed.
    pub compressed: u64,
    /// Those of them that do not follow the one before.
    pub fragmented: u64,
    /// Where the last cluster in use ends, in bytes of the file.
    pub end: u64,
    /// The mark of an image that was not closed was taken away.
    pub cleaned: bool,
    /// The first problems, in words.
    pub problems: Vec<String>,
    /// Problems that are not in `problems`.
    pub more_problems: u64,
    /// Those of `errors` that are references to what is beyond the end of the file.
    pub(super) beyond: u64,
}

impl Findings {
    pub(super) fn error(&mut self, words: impl FnOnce() -> String) {
        self.errors += 1;
        self.tell("error", words);
    }

    pub(super) fn leak(&mut self, words: impl FnOnce() -> String) {
        self.leaks += 1;
        self.tell("leak", words);
    }

    fn tell(&mut self, kind: &str, words: impl FnOnce() -> String) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(format!("{kind}: {}", words()));
        } else {
            self.more_problems += 1;
        }
    }
}
