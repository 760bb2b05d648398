//! The key of a user, from the files that Ceph has keys in: so that no file has to be read by the library,
//! which does so when it connects.

/// The key of `user` (`client.admin`) in a keyring: sections in brackets, `key = …` in them.
pub(crate) fn of(user: &str, keyring: &str) -> Option<String> {
    let mut here = false;
    for line in keyring.lines() {
        let line = line.split(['#', ';']).next().unwrap_or_default().trim();
        if let Some(section) = line.strip_prefix('[') {
            here = section.strip_suffix(']').is_some_and(|section| section.trim() == user);
        } else if here {
            let entry = line.split_once('=').filter(|(name, _)| name.trim() == "key");
            if let Some((_, value)) = entry {
                return Some(value.trim().trim_matches('"').to_owned());
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::of;

    #[test]
    fn a_key_is_that_of_its_user() {
        let ring = "[client.admin]\n\tkey = AAA==\n\tcaps mon = \"allow *\"\n\
                    # [client.b]\n[client.b]\n caps osd = x\n  key=BBB==  ; mine\n[mon.]\nkey = C\n";
        assert_eq!(of("client.admin", ring).as_deref(), Some("AAA=="));
        assert_eq!(of("client.b", ring).as_deref(), Some("BBB=="));
        assert_eq!(of("client.c", ring), None);
        assert_eq!(of("client.b", "[client.b]\n[client.c]\nkey = D\n"), None);
    }
}
