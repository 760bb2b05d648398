//! Clusters of an image that are counted, and that no table names: taken ahead, or freed and not given back yet. A
//! killed process loses them, unless whoever serves the image next knows them.
//!
//! Each is in the list before it is counted, or before the entry changes that named it; and it is there until a
//! table names it, or it is counted no more. Of one that an entry may lead to, or did, it is said which: so who reads
//! the list can look.

use super::{Journal, LOOSE};
use std::collections::HashMap;
use std::sync::Arc;

/// So many of them are left to those that are taken ahead.
const AHEAD: usize = 1536;

/// One of them.
#[derive(Debug)]
struct Loose {
    /// Where in the list it is.
    place: Option<usize>,
    /// The cluster of the disk whose entry may lead there.
    user: Option<u64>,
}

/// Those of one image, and the list while it has a journal.
#[derive(Debug, Default)]
pub(crate) struct LooseClusters {
    journal: Option<Arc<Journal>>,
    /// It has had a journal.
    is_kept: bool,
    clusters: HashMap<u64, Loose>,
    unused: Vec<usize>,
}

impl LooseClusters {
    /// The list, which is empty, is that of this image from now on.
    pub(crate) fn begin(&mut self, journal: &Arc<Journal>) {
        self.unused = (0..LOOSE).rev().collect();
        for (cluster, loose) in &mut self.clusters {
            loose.place = self.unused.pop();
            if let Some(place) = loose.place {
                journal.set_loose(place, *cluster, loose.user);
            }
        }
        (self.journal, self.is_kept) = (Some(Arc::clone(journal)), true);
    }

    /// The list is what a process left that served this image before.
    pub(crate) fn go_on(&mut self, journal: &Arc<Journal>) {
        for place in (0..LOOSE).rev() {
            match journal.loose_at(place) {
                Some((cluster, user)) if !self.clusters.contains_key(&cluster) => {
                    self.clusters.insert(cluster, Loose { place: Some(place), user });
                }
                _ => {
                    journal.clear_loose(place);
                    self.unused.push(place);
                }
            }
        }
        (self.journal, self.is_kept) = (Some(Arc::clone(journal)), true);
    }

    /// It is the list of another image from now on, or of none.
    pub(crate) fn end(&mut self) {
        self.journal = None;
        self.unused.clear();
        self.clusters.values_mut().for_each(|loose| loose.place = None);
    }

    /// These are about to be counted, or hold metadata that nothing names any more.
    pub(crate) fn take_ahead(&mut self, clusters: &[u64]) {
        clusters.iter().for_each(|cluster| self.add(*cluster, None));
    }

    /// The entry of `user`, a cluster of the disk, may lead to this one, if it was taken ahead.
    pub(crate) fn set_user(&mut self, cluster: u64, user: u64) {
        if self.clusters.contains_key(&cluster) {
            self.add(cluster, Some(user));
        }
    }

    /// The entry of `user`, or the L1 entry of the table that would have that, leads to this one, and is about to lead
    /// elsewhere.
    pub(crate) fn free(&mut self, cluster: u64, user: u64) {
        if self.clusters.len() < LOOSE - AHEAD {
            self.add(cluster, Some(user));
        }
    }

    /// A table names it, or it is counted no more.
    pub(crate) fn remove(&mut self, cluster: u64) {
        let place = self.clusters.remove(&cluster).and_then(|loose| loose.place);
        if let (Some(place), Some(journal)) = (place, &self.journal) {
            journal.clear_loose(place);
            self.unused.push(place);
        }
    }

    fn add(&mut self, cluster: u64, user: Option<u64>) {
        // What is listed has its user noted all the same: without one, no entry would be thought to lead there.
        let has_room = self.clusters.len() < LOOSE || self.clusters.contains_key(&cluster);
        if !self.is_kept || !has_room {
            return;
        }
        let unused = &mut self.unused;
        let new = || Loose { place: unused.pop(), user };
        let loose = self.clusters.entry(cluster).or_insert_with(new);
        loose.user = user;
        if let (Some(place), Some(journal)) = (loose.place, &self.journal) {
            journal.set_loose(place, cluster, user);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry may lead to what is listed, however full the list is.
    #[test]
    fn c47_a_full_list_takes_users_of_what_it_has() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(Journal::BYTES).unwrap();
        let journal = Arc::new(Journal::map(Arc::new(file), 0).unwrap());
        let mut list = LooseClusters::default();
        list.begin(&journal);
        let clusters: Vec<u64> = (1..=LOOSE as u64 + 1).collect();
        list.take_ahead(&clusters);
        list.set_user(7, 70);
        let found = journal.loose();
        assert_eq!(found.len(), LOOSE);
        assert!(found.contains(&(7, Some(70))), "{:?}", &found[..8]);
    }
}
