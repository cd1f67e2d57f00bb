// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strings"
)

// paragraph is a piece of text that can be split into sentences. line is where it begins;
// for a Go comment, where the comment begins.
type paragraph struct {
	text string
	line int
}

func extractor(name string) func(text string) []paragraph {
	switch ext := filepath.Ext(name); {
	case ext == ".go":
		return goComments
	case ext == ".md":
		return markdown
	case ext == ".sh" || ext == ".yaml" || ext == ".yml" || ext == ".service" || ext == ".conf" || ext == ".env" || ext == ".tpl",
		name == "Makefile" || name == "postinst" || name == "prerm" || name == "postrm":
		return hashComments
	}
	return nil
}

// goComments returns the paragraphs of all comments of a Go file. It returns none if the
// file cannot be parsed: the compiler reports that.
func goComments(text string) (all []paragraph) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, "", text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil
	}

	for _, group := range file.Comments {
		line := files.Position(group.Pos()).Line
		for p := range strings.SplitSeq(group.Text(), "\n\n") {
			if !strings.HasPrefix(p, "\t") { // an indented paragraph is code
				all = append(all, paragraph{p, line})
			}
		}
	}
	return all
}

var hash = regexp.MustCompile(`(?:^|\s)#+\s+(.*)$`)

// hashComments returns the comments of a file in which comments begin with #. Adjacent
// lines that are only comments are one paragraph. A comment behind code is one by itself, like
// the cell of a table.
func hashComments(text string) []paragraph {
	var page strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		m := hash.FindStringSubmatch(line)
		switch {
		case m == nil:
		case line[0] == '#':
			page.WriteString(m[1])
		default:
			page.WriteString("|" + m[1])
		}
		page.WriteByte('\n')
	}
	return markdown(page.String())
}

var (
	inlineCode = regexp.MustCompile("`[^`\n]*`")
	linkTarget = regexp.MustCompile(`\]\([^)]*\)`)
	listItem   = regexp.MustCompile(`^\s*(?:[-*]|[0-9]+\.) `)
	separator  = regexp.MustCompile(`^\|[-:| ]+\|$`)
)

// markdown returns the paragraphs, list items and table cells of a page, in the form that
// plainText describes. It omits blocks of code, headings, the head of each table, and lines that
// begin with an HTML comment.
func markdown(text string) (all []paragraph) {
	var block paragraph
	end := func() {
		if block.text != "" {
			all = append(all, block)
		}
		block = paragraph{}
	}

	lines := strings.Split(text, "\n")
	fenced := false
	blank := true
	for i, line := range lines {
		fence := strings.HasPrefix(line, "```")
		fenced = fenced != fence
		switch {
		case fence || fenced || strings.HasPrefix(line, "#") || strings.HasPrefix(line, "<!--"):
			end()
		case strings.TrimSpace(line) == "":
			end()
			blank = true
			continue

		case strings.HasPrefix(line, "    ") && blank && block.text == "": // a block of code
			continue
		case strings.HasPrefix(line, "|"):
			end()
			if !separator.MatchString(line) && (i+1 == len(lines) || !separator.MatchString(lines[i+1])) {
				for cell := range strings.SplitSeq(plainText(line), "|") {
					all = append(all, paragraph{strings.TrimSpace(cell), i + 1})
				}
			}

		default:
			if listItem.MatchString(line) {
				end()
			}
			if block.text == "" {
				block.line = i + 1
			}
			block.text += plainText(listItem.ReplaceAllString(line, "")) + "\n"
		}
		blank = false
	}
	end()
	return all
}

// plainText replaces code by X and removes the targets of links, because neither is part of
// the sentence.
func plainText(line string) string {
	return linkTarget.ReplaceAllString(inlineCode.ReplaceAllString(line, "X"), "]")
}

var sentenceEnd = regexp.MustCompile(`[.!?:;]["”)*]*\s+`)

// sentences splits a paragraph into its sentences, each on one line and with its
// punctuation. A colon or semicolon also ends a sentence.
func sentences(text string) (all []string) {
	text = strings.Join(strings.Fields(text), " ")
	for text != "" {
		at := sentenceEnd.FindStringIndex(text)
		if at == nil {
			return append(all, text)
		}
		all = append(all, strings.TrimSpace(text[:at[1]]))
		text = text[at[1]:]
	}
	return all
}
