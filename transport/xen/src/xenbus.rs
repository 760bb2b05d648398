//! The life of a device on Xen's bus, as a back-end decides it: what is seen in, what to do out.
//!
//! Nothing happens here. All that counts is what the store says now, not how it came there: watches
//! may tell of a change late, twice, or of many at once (hazard B14).
//!
//! Source: `xen/include/public/io/xenbus.h` and the life cycle in `blkif.h` (MIT).

/// `enum xenbus_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) enum State {
    /// Not there, or not a number.
    #[default]
    Unknown = 0,
    /// A device was made; nobody has looked at it.
    Initialising = 1,
    /// The back-end has said what it offers.
    InitWait = 2,
    /// The front-end has said where its rings are.
    Initialised = 3,
    /// Rings are in use.
    Connected = 4,
    /// One side wants to end it.
    Closing = 5,
    /// One side has ended it.
    Closed = 6,
    /// Not for disks.
    Reconfiguring = 7,
    /// Not for disks.
    Reconfigured = 8,
}

impl State {
    /// From the store.
    #[must_use]
    pub(super) fn parse(text: &str) -> Self {
        match text.trim() {
            "1" => Self::Initialising,
            "2" => Self::InitWait,
            "3" => Self::Initialised,
            "4" => Self::Connected,
            "5" => Self::Closing,
            "6" => Self::Closed,
            "7" => Self::Reconfiguring,
            "8" => Self::Reconfigured,
            _ => Self::Unknown,
        }
    }

    /// For the store.
    #[must_use]
    pub(super) const fn digit(self) -> &'static str {
        match self {
            Self::Unknown => "0",
            Self::Initialising => "1",
            Self::InitWait => "2",
            Self::Initialised => "3",
            Self::Connected => "4",
            Self::Closing => "5",
            Self::Closed => "6",
            Self::Reconfiguring => "7",
            Self::Reconfigured => "8",
        }
    }
}

/// What the store says of a device, at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Seen {
    /// The back-end's folder is there.
    pub(super) present: bool,
    /// `online` is not 0: the toolstack wants the device to stay.
    pub(super) online: bool,
    /// The back-end's own state, which the toolstack writes as well.
    pub(super) back: State,
    /// The front-end's state.
    pub(super) front: State,
}

impl Seen {
    /// Both sides say that rings are in use.
    pub(super) fn is_connected(&self) -> bool {
        self.present && (self.back, self.front) == (State::Connected, State::Connected)
    }
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Say what is offered, then go to `InitWait`.
    Offer,
    /// Map the front-end's rings and serve them, then go to `Connected`.
    Connect,
    /// The rings are in use and not ours: a predecessor was serving them. Go on where it was.
    Adopt,
    /// Finish what is in flight and let the rings go; the state stays.
    Disconnect,
    /// Write this state.
    Switch(State),
    /// The device has gone.
    Forget,
}

/// True if a front-end in this state uses its rings no more, so that their memory may be another's.
#[must_use]
pub(super) fn has_gone(front: State) -> bool {
    matches!(front, State::Closed | State::Unknown | State::Initialising)
}

/// What to do next about a device whose rings are `connected`; `None`: wait for a change. To be asked
/// again after each action, with what is seen then.
#[must_use]
pub(super) fn next(seen: Seen, connected: bool) -> Option<Action> {
    use State as S;
    if !seen.present {
        return Some(if connected { Action::Disconnect } else { Action::Forget });
    }
    // Rings of a front-end that has ended must go first, whatever comes then.
    let front_has_gone = has_gone(seen.front);
    let in_use = matches!(seen.back, S::Connected | S::Closing);
    if connected && (front_has_gone || !in_use) {
        return Some(Action::Disconnect);
    }
    match seen.back {
        // At once: the toolstack runs its hotplug script only after that.
        S::Unknown | S::Initialising => Some(Action::Offer),
        S::InitWait | S::Initialised => match seen.front {
            S::Initialised | S::Connected => Some(Action::Connect),
            // It may never come: nobody else would end a device that is not wanted.
            _ if !seen.online => Some(Action::Switch(S::Closed)),
            S::Closing => Some(Action::Switch(S::Closing)),
            _ => None,
        },
        S::Connected => match seen.front {
            S::Connected | S::Initialised if connected => None,
            S::Connected => Some(Action::Adopt),
            S::Initialised => Some(Action::Connect),
            S::Closing => Some(Action::Switch(S::Closing)),
            // It ended while nobody was looking.
            _ => Some(Action::Switch(S::Closed)),
        },
        // The front-end has to agree: it may still have requests to wait for.
        S::Closing => front_has_gone.then_some(Action::Switch(S::Closed)),
        S::Closed => match seen.front {
            // It comes back: after its driver was loaded again, or its domain resumed.
            S::Initialising if seen.online => Some(Action::Offer),
            _ => None,
        },
        S::Reconfiguring | S::Reconfigured => Some(Action::Switch(S::Closing)),
    }
}

#[cfg(test)]
mod tests {
    use super::State as S;
    use super::*;

    const ALL: [State; 9] = [
        S::Unknown,
        S::Initialising,
        S::InitWait,
        S::Initialised,
        S::Connected,
        S::Closing,
        S::Closed,
        S::Reconfiguring,
        S::Reconfigured,
    ];

    /// A store with nothing but the states, on which actions are carried out.
    #[derive(Clone, Copy, Debug)]
    struct Bus {
        seen: Seen,
        connected: bool,
    }

    impl Bus {
        fn new() -> Self {
            let seen =
                Seen { present: true, online: true, back: S::Initialising, front: S::Initialising };
            Self { seen, connected: false }
        }

        fn act(&mut self, action: Action) {
            match action {
                Action::Offer => self.seen.back = S::InitWait,
                Action::Connect | Action::Adopt => {
                    self.connected = true;
                    self.seen.back = S::Connected;
                }
                Action::Disconnect => self.connected = false,
                Action::Switch(state) => self.seen.back = state,
                Action::Forget => self.seen.back = S::Unknown,
            }
        }

        /// Acts until there is nothing to do.
        fn settle(&mut self) -> Vec<Action> {
            let mut done = Vec::new();
            while let Some(action) = next(self.seen, self.connected) {
                done.push(action);
                if action == Action::Forget {
                    break;
                }
                self.act(action);
                assert!(done.len() < 10, "it goes in circles: {done:?} {self:?}");
            }
            done
        }

        fn front(&mut self, state: State) -> Vec<Action> {
            self.seen.front = state;
            self.settle()
        }
    }

    #[test]
    fn a_disk_comes_and_goes() {
        let mut bus = Bus::new();
        assert_eq!(bus.settle(), [Action::Offer]);
        assert_eq!(bus.front(S::Initialised), [Action::Connect]);
        assert_eq!(bus.front(S::Connected), []);
        // The toolstack takes it away.
        (bus.seen.online, bus.seen.back) = (false, S::Closing);
        assert_eq!(bus.settle(), []);
        assert!(bus.connected, "the front-end may still have requests");
        assert_eq!(bus.front(S::Closing), []);
        assert_eq!(bus.front(S::Closed), [Action::Disconnect, Action::Switch(S::Closed)]);
        bus.seen.present = false;
        assert_eq!(bus.settle(), [Action::Forget]);
    }

    #[test]
    fn a_front_end_that_closes_can_come_back() {
        let mut bus = Bus::new();
        bus.settle();
        bus.front(S::Initialised);
        assert_eq!(bus.front(S::Closing), [Action::Switch(S::Closing)]);
        assert_eq!(bus.front(S::Closed), [Action::Disconnect, Action::Switch(S::Closed)]);
        assert_eq!(bus.front(S::Initialising), [Action::Offer]);
        assert_eq!(bus.front(S::Initialised), [Action::Connect]);
        // Without closing: its kernel was replaced.
        assert_eq!(
            bus.front(S::Initialising),
            [Action::Disconnect, Action::Switch(S::Closed), Action::Offer]
        );
        assert_eq!(bus.front(S::Connected), [Action::Connect]);
    }

    #[test]
    fn a_guest_that_dies_leaves_nothing_connected() {
        let mut bus = Bus::new();
        bus.settle();
        bus.front(S::Initialised);
        assert_eq!(bus.front(S::Unknown), [Action::Disconnect, Action::Switch(S::Closed)]);
        let mut bus = Bus::new();
        bus.settle();
        bus.front(S::Connected);
        bus.seen = Seen::default();
        assert_eq!(bus.settle(), [Action::Disconnect, Action::Forget]);
    }

    #[test]
    fn a_back_end_that_comes_back_adopts() {
        let mut bus = Bus::new();
        bus.settle();
        bus.front(S::Connected);
        bus.connected = false;
        assert_eq!(bus.settle(), [Action::Adopt]);
    }

    /// From everything that can be seen it comes to rest, and never rests with rings of a front-end
    /// that has ended.
    #[test]
    fn every_state_comes_to_rest() {
        for back in ALL {
            for front in ALL {
                for flags in 0..8 {
                    let [present, online, connected] = [1, 2, 4].map(|bit| flags & bit != 0);
                    let seen = Seen { present, online, back, front };
                    let mut bus = Bus { seen, connected };
                    bus.settle();
                    let ended = matches!(front, S::Closed | S::Unknown | S::Initialising);
                    assert!(!(bus.connected && (ended || !present)), "{seen:?}");
                    if bus.connected {
                        assert!(matches!(bus.seen.back, S::Connected | S::Closing), "{seen:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn states_are_what_they_are_in_the_store() {
        for state in ALL {
            assert_eq!(State::parse(state.digit()), state);
        }
        for nonsense in ["", "-1", "9", "44", "x"] {
            assert_eq!(State::parse(nonsense), S::Unknown);
        }
    }
}
