//! Which worker gets which queue.

/// How many queues each worker of one engine has.
pub(crate) struct Spread {
    queues: Vec<usize>,
    /// Guests with few CPUs use the first queues only, so these are spread by themselves.
    firsts: Vec<usize>,
}

impl Spread {
    /// No workers yet.
    pub(crate) const fn new() -> Self {
        Self { queues: Vec::new(), firsts: Vec::new() }
    }

    /// There are as many workers from now on, and never fewer.
    pub(crate) fn grow(&mut self, workers: usize) {
        self.queues.resize(workers, 0);
        self.firsts.resize(workers, 0);
    }

    /// A place for a disk of this many queues, which so many workers serve: the worker of its queue 0; the
    /// others follow round robin. First all workers get as many queues, then as many first queues.
    pub(crate) fn place(&mut self, queues: usize, serve: usize) -> usize {
        let workers = self.queues.len();
        // The sum of squares is least where all have the same.
        let load = |first: usize| {
            let with = |at: usize| {
                let after = (at + workers - first) % workers;
                let more =
                    if after < serve { queues.saturating_sub(after).div_ceil(serve) } else { 0 };
                self.queues[at] + more
            };
            (0..workers).map(|at| with(at).pow(2)).sum::<usize>()
        };
        let first = (0..workers).min_by_key(|&first| (load(first), self.firsts[first], first));
        let first = first.unwrap_or(0);
        for queue in 0..queues {
            self.queues[(first + queue % serve) % workers] += 1;
        }
        self.firsts[first] += 1;
        first
    }

    /// A disk of `queues` that `serve` workers served, and that was placed at `first` when there were
    /// `workers`, has gone.
    pub(crate) fn leave(&mut self, first: usize, (queues, serve): (usize, usize), workers: usize) {
        for queue in 0..queues {
            self.queues[(first + queue % serve) % workers] -= 1;
        }
        self.firsts[first] -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn over(workers: usize) -> Spread {
        let mut spread = Spread::new();
        spread.grow(workers);
        spread
    }

    #[test]
    fn whoever_comes_takes_the_place_of_who_has_gone() {
        let mut spread = over(2);
        let firsts: Vec<_> = (0..3).map(|_| spread.place(1, 1)).collect();
        assert_eq!(firsts, [0, 1, 0]);
        spread.leave(0, (1, 1), 2);
        spread.leave(0, (1, 1), 2);
        // New workers have nothing to do: they come first, as the one that was left.
        spread.grow(3);
        assert_eq!(spread.place(1, 1), 0);
        assert_eq!(spread.place(1, 1), 2);
        assert_eq!((spread.queues, spread.firsts), (vec![1, 1, 1], vec![1, 1, 1]));
    }

    #[test]
    fn queues_and_first_queues_are_spread_evenly() {
        for workers in 1..=9 {
            for queues in 1..=17 {
                let mut spread = over(workers);
                for disk in 1..=40 {
                    spread.place(queues, workers.min(queues));
                    let range = |list: &[usize]| {
                        list.iter().max().unwrap_or(&0) - list.iter().min().unwrap_or(&0)
                    };
                    let what = format!("{disk} disks of {queues} queues, {workers} workers");
                    assert!(range(&spread.queues) <= 1, "{what}: {:?}", spread.queues);
                    // Where both cannot be even at every step, the queues are.
                    if disk * queues % workers == 0 && disk % workers == 0 {
                        assert_eq!(range(&spread.firsts), 0, "{what}: {:?}", spread.firsts);
                    }
                }
            }
        }
    }

    #[test]
    fn disks_of_as_many_queues_as_workers_begin_on_different_ones() {
        let mut spread = over(4);
        let firsts: Vec<_> = (0..8).map(|_| spread.place(16, 4)).collect();
        assert_eq!(firsts, [0, 1, 2, 3, 0, 1, 2, 3]);
    }

    #[test]
    fn disks_that_few_workers_serve_take_those_with_the_fewest_queues() {
        // Of eight workers each disk has two, as one of a server with two connections.
        let mut spread = over(8);
        let firsts: Vec<_> = (0..8).map(|_| spread.place(8, 2)).collect();
        assert_eq!(firsts, [0, 2, 4, 6, 1, 3, 5, 7]);
        assert_eq!(spread.queues, [8; 8]);
        for first in firsts {
            spread.leave(first, (8, 2), 8);
        }
        assert_eq!((spread.queues, spread.firsts), (vec![0; 8], vec![0; 8]));
    }
}
