//! Options of the command line beside a file.

use super::{DaemonArgs, NbdSecurity, Plan};

impl Plan {
    /// Options of the command line win over the file.
    pub fn overrule(&mut self, options: DaemonArgs, nbd: NbdSecurity) {
        let said = [
            ("control", options.control.is_some()),
            ("cpus", options.cpus.is_some()),
            ("isolate", options.each.isolate.is_some()),
            ("metrics", options.metrics.is_some()),
            ("poll-budget", options.poll_budget.is_some()),
            ("poll-max-us", options.poll_max_us.is_some()),
            ("state-dir", options.state_dir.is_some()),
            ("user", options.user.is_some()),
        ];
        let nbd_said = nbd != NbdSecurity::default();
        let tls = NbdSecurity::WORDS.map(|word| (word, nbd_said));
        for (word, _) in said.into_iter().chain(tls).filter(|(_, said)| *said) {
            self.origins.overrule(word);
        }
        self.daemon = options.or(&self.daemon);
        self.nbd = nbd.or(&self.nbd);
    }
}
