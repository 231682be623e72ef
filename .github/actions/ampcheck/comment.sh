#!/usr/bin/env bash
# Post the file $1 on the pull request $PULL_REQUEST, in place of the bot's comment with the same first line.
# A token that may not comment, such as that of a pull request from a fork, is a warning.
set -euo pipefail

MARKER=$(head -n 1 "$1")
export MARKER
comments="repos/$GITHUB_REPOSITORY/issues/$PULL_REQUEST/comments"

post() {
  local known
  known=$(gh api --paginate "$comments" \
    --jq '.[] | select(.user.type == "Bot" and (.body | startswith(env.MARKER))) | .id') || return 1
  known=${known%%$'\n'*}
  if [[ -n "$known" ]]; then
    gh api --silent --method PATCH "repos/$GITHUB_REPOSITORY/issues/comments/$known" --field "body=@$1"
  else
    gh api --silent --method POST "$comments" --field "body=@$1"
  fi
}

if ! post "$1"; then
  echo "::warning title=ampcheck::the comment could not be posted; the job needs the permission pull-requests: write"
fi
